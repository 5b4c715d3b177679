"""Tiles of paged prefill attention: what each GPU can hold of them in registers and shared memory.

Registers and instructions are those of ahead-of-time compiles with Triton 3.9.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kernels.device import DeviceLimits


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int  # per thread; left alone, ptxas spills some for one more program


# By the padded head dimension: (where rows abound, where they are few).
_Tiles = dict[int, tuple[_Tile, _Tile]]

# Warpgroups multiply 64 rows or more, and wait for their scores. Meanwhile those of another program
# can multiply, if registers (D = 64) or shared memory (few rows) allow for two per multiprocessor.
# Where they do not, D = 128 takes all 128 keys that fit: 549 instructions per tile and warp, of
# which 368 are the softmax; twice 64 keys take 728. Three stages copy a tile while two are awaited
# or used; with two, all that D = 256 has room for, copies begin with the second product.
_HOPPER: _Tiles = {
    64: (_Tile(128, 64, 8, 3, 128), _Tile(64, 64, 4, 3, 255)),
    128: (_Tile(128, 128, 8, 3, 255), _Tile(64, 64, 4, 3, 255)),
    256: (_Tile(128, 64, 8, 2, 255), _Tile(64, 32, 4, 2, 255)),
}
# The same, but for what would be spilled: here registers are also the way of sums and scores from
# and to the memory that the products have of their own.
_BLACKWELL: _Tiles = _HOPPER | {
    64: (_Tile(128, 64, 8, 3, 255), _Tile(64, 64, 4, 3, 255)),
    256: (_Tile(128, 32, 8, 3, 255), _Tile(64, 32, 4, 2, 255)),
}
# Warps multiply from registers, which hold the queries throughout: fewer keys than on Hopper leave
# room for them. At most 68 KiB of shared memory, so that 99 are enough.
_WARPS: _Tiles = {
    64: (_Tile(128, 64, 8, 3, 255), _Tile(64, 32, 4, 3, 255)),
    128: (_Tile(128, 32, 8, 3, 255), _Tile(64, 32, 4, 3, 255)),
    256: (_Tile(64, 32, 8, 2, 255), _Tile(64, 32, 8, 2, 255)),
}
# Full float32 has no matrix instruction; larger tiles are spilled. For parity, not for speed.
_FLOAT32 = _Tile(32, 16, 8, 2, 128)


def settings(
    num_rows: int,
    num_sequences: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    limits: DeviceLimits,
) -> dict[str, int]:
    """Return tile, warps, stages and registers.

    Large tiles read keys least often. They are for chunks that fill them on average, and only if
    they are enough to occupy the GPU.

    Args:
        num_rows: tokens times the query heads that share a KV head.
        num_sequences, num_kv_heads, head_dim: of the call.
        dtype, cache_dtype: of queries and keys.
        limits: of the GPU.
    """
    block_d = triton.next_power_of_2(head_dim)
    width = max(block_d, 64)
    enough = num_rows // 128 * num_kv_heads >= limits.num_sms
    is_narrow = not (enough and num_rows > 64 * num_sequences)
    if dtype == torch.float32:
        tile = _FLOAT32
    elif limits.capability[0] not in (9, 10):
        tile = _WARPS[width][is_narrow]
    elif limits.capability[0] == 9 and (block_d < 256 or cache_dtype == dtype):
        tile = _HOPPER[width][is_narrow]
    else:  # on Hopper too, where widening fp8 takes registers
        tile = _BLACKWELL[width][is_narrow]
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }
