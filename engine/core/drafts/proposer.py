"""Proposer: guesses the next tokens of a sequence."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.core.request import Request


class Proposer(Protocol):
    """Guesses tokens; how good they are decides how fast tokens come, never which.

    Attributes:
        max_tokens: guesses for one sequence in a step at most.
    """

    max_tokens: int

    def propose(self, request: Request, num_tokens: int) -> NDArray[np.int32]:
        """Return up to `num_tokens` tokens that may follow those of a running sequence."""
