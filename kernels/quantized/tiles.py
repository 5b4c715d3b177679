"""The order in which programs take the tiles of a result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of(
    i_tile,
    num_rows,
    N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BAND: tl.constexpr,
):
    """Return the row and the column of a tile of the result.

    Tiles are taken in bands of BAND row tiles, column by column: the rows of a band stay in the L2
    cache, and the weight is read once per band.
    """
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    i_band = i_tile // (BAND * TILES_N)
    height = tl.minimum(tl.cdiv(num_rows, BLOCK_M) - i_band * BAND, BAND)
    i_in_band = i_tile % (BAND * TILES_N)
    return i_band * BAND + i_in_band % height, i_in_band // height
