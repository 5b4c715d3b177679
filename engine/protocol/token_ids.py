"""Token ids as int32 arrays, and as the little-endian bytes that messages carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError

TokenIds = NDArray[np.int32]

TOKEN_ID_BYTES = 4
_INT32 = np.dtype("<i4")
_LIMITS = np.iinfo(np.int32)


def token_array(field: str, ids: Sequence[int] | NDArray[np.integer[Any]]) -> TokenIds:
    """Return `ids` as a one-dimensional int32 array.

    Raises:
        RequestError: an id does not fit into 32 bits; the text names `field`.
    """
    try:
        wide = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        raise RequestError("a token id does not fit into 32 bits", param=field) from None
    if wide.size and not _LIMITS.min <= wide.min() <= wide.max() <= _LIMITS.max:
        raise RequestError("a token id does not fit into 32 bits", param=field)
    return wide.astype(np.int32)


def pack_token_ids(ids: Sequence[int] | TokenIds, field: str = "token_ids") -> bytes:
    """Return `ids` as bytes, four for each; errors as `token_array`."""
    array = ids if isinstance(ids, np.ndarray) else token_array(field, ids)
    return array.astype(_INT32, copy=False).tobytes()


def unpack_token_ids(data: bytes, field: str = "token_ids") -> TokenIds:
    """Return the ids that `pack_token_ids` has packed: a read-only array over `data`.

    Raises:
        RequestError: the number of bytes is no multiple of four; the text names `field`.
    """
    if len(data) % TOKEN_ID_BYTES:
        raise RequestError(
            f"{len(data)} bytes are not a whole number of int32 token ids", param=field
        )
    return np.frombuffer(data, dtype=_INT32)
