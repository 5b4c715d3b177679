"""Tile sizes of paged prefill attention, by the registers and shared memory of each GPU.

Register and instruction counts are from ahead-of-time compilation with Triton 3.9.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.device import DeviceLimits, next_power_of_2


class _Tile(NamedTuple):
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int  # per thread; unconstrained, ptxas spills some to fit one more program


# By the padded head dimension: (for many rows, for few rows).
_Tiles = dict[int, tuple[_Tile, _Tile]]

# Hopper: a warpgroup multiplies 64 rows or more and waits for its scores. Another program can
# multiply meanwhile if registers (D = 64) or shared memory (few rows) allow two per SM. Where they
# do not, D = 128 takes all 128 keys that fit: 549 instructions per tile and warp, 368 of them the
# softmax; two tiles of 64 keys take 728. With three stages one tile is copied while two are waited
# for or used; with two stages, all that D = 256 has room for, copies start at the second product.
_HOPPER: _Tiles = {
    64: (_Tile(128, 64, 8, 3, 128), _Tile(64, 64, 4, 3, 255)),
    128: (_Tile(128, 128, 8, 3, 255), _Tile(64, 64, 4, 3, 255)),
    256: (_Tile(128, 64, 8, 2, 255), _Tile(64, 32, 4, 2, 255)),
}
# Blackwell: the same, limited by spills: sums and scores also pass through registers on their way
# to and from tensor memory.
_BLACKWELL: _Tiles = _HOPPER | {
    64: (_Tile(128, 64, 8, 3, 255), _Tile(64, 64, 4, 3, 255)),
    256: (_Tile(128, 32, 8, 3, 255), _Tile(64, 32, 4, 2, 255)),
}
# mma.sync: operands come from registers, which hold the queries throughout, so fewer keys fit than
# on Hopper. At most 68 KiB of shared memory, so that GPUs with 99 KiB suffice.
_WARPS: _Tiles = {
    64: (_Tile(128, 64, 8, 3, 255), _Tile(64, 32, 4, 3, 255)),
    128: (_Tile(128, 32, 8, 3, 255), _Tile(64, 32, 4, 3, 255)),
    256: (_Tile(64, 32, 8, 2, 255), _Tile(64, 32, 8, 2, 255)),
}
# Rows of a sequence, on average, beyond which large tiles are chosen: those that fill them. On
# Hopper small ones are faster for D = 128 up to here: 0.22 ms in place of 0.25 for 8 chunks of
# 1,024 tokens of an 8B model on an H200.
_FEWEST_ROWS, _FEWEST_OF_HOPPER = 64, 4096
# No matrix instruction has full float32 precision; larger tiles spill. For parity, not speed.
_FLOAT32 = _Tile(32, 16, 8, 2, 128)


def settings(
    num_rows: int,
    num_sequences: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    limits: DeviceLimits,
    *,
    is_fixed: bool = False,
) -> dict[str, int]:
    """Return tile sizes, warps, stages and registers.

    Large tiles read each key fewer times. They are chosen if chunks fill them on average and there
    are enough of them to occupy the GPU.

    Args:
        num_rows: tokens times query heads per KV head.
        num_sequences, num_kv_heads, head_dim: of the call.
        dtype, cache_dtype: of queries and keys.
        limits: of the GPU.
        is_fixed: choose by the dtypes, `head_dim` and the GPU alone: tiles for few rows.
    """
    block_d = next_power_of_2(head_dim)
    width = max(block_d, 64)
    enough = num_rows // 128 * num_kv_heads >= limits.num_sms
    is_hopper = limits.capability[0] == 9
    is_long = is_hopper and block_d == 128 and cache_dtype == dtype
    fewest = _FEWEST_OF_HOPPER if is_long else _FEWEST_ROWS
    is_narrow = is_fixed or not (enough and num_rows > fewest * num_sequences)
    if dtype == torch.float32:
        tile = _FLOAT32
    elif limits.capability[0] not in (9, 10):
        tile = _WARPS[width][is_narrow]
    elif is_hopper and (block_d < 256 or cache_dtype == dtype):
        tile = _HOPPER[width][is_narrow]
    else:  # on Hopper too, where converting fp8 takes registers
        tile = _BLACKWELL[width][is_narrow]
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_D": block_d,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "maxnreg": tile.max_registers,
    }
