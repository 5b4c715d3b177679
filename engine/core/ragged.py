"""Lists of different lengths, one after the other in one array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of different lengths.

    Attributes:
        start_loc: int32 [N + 1], ascending from 0.
        values: int32 [start_loc[-1]].
    """

    start_loc: Int32s
    values: Int32s

    def __getitem__(self, item: int) -> Int32s:
        """Return list `item`."""
        return self.values[self.start_loc[item] : self.start_loc[item + 1]]

    @property
    def lengths(self) -> Int32s:
        """int32 [N]."""
        return np.diff(self.start_loc)


def ragged(lists: Sequence[Sequence[int] | Int32s]) -> Ragged:
    """Return `lists`, one after the other."""
    start_loc = np.zeros(len(lists) + 1, dtype=np.int32)
    np.cumsum([len(values) for values in lists], out=start_loc[1:])
    if not start_loc[-1]:
        return Ragged(start_loc, np.zeros(0, dtype=np.int32))
    return Ragged(start_loc, np.concatenate([np.array(values, dtype=np.int32) for values in lists]))
