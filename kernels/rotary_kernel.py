"""The kernel of `kernels.rotary`: each program processes a tile of heads of one or more tokens.

The first programs rotate queries, the next ones keys, and the last ones copy values. A tile has
ROWS heads; the heads of a token are adjacent, so that few programs load the angles of one token.
Each value is read once, kept in registers and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.dependent_launch import start_next, wait
from kernels.device import next_power_of_2
from kernels.e4m3 import to_e4m3

TILE = 4096  # values per program, 32 heads of 128
# 16 values per thread, all loaded at once; 32 to 40 registers for the head sizes in use, which
# gives an occupancy of 48 warps per SM.
NUM_WARPS = 8


@triton.jit
def _store(p, b_x, m, b_factor, NATIVE: tl.constexpr):
    """Write `b_x` [ROWS, any]; for rows with a factor, multiplied in float32 and as float8."""
    if b_factor is not None:
        tl.store(p, to_e4m3(b_x.to(tl.float32) * b_factor[:, None], NATIVE), mask=m)
    else:
        tl.store(p, b_x.to(p.dtype.element_ty), mask=m)


@triton.jit
def _load_pairs(p, m, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the rotated dimensions of the rows at `p`: both members of each pair."""
    if INTERLEAVED:
        o = tl.arange(0, 2 * HALF)
        b = tl.load(p[:, None] + o[None, :], m[:, None] & (o < R)[None, :], 0.0)
        b_a, b_b = tl.split(b.reshape(b.shape[0], HALF, 2))
    else:
        o = tl.arange(0, HALF)
        m = m[:, None] & (o < R // 2)[None, :]
        b_a = tl.load(p[:, None] + o[None, :], m, 0.0)
        b_b = tl.load(p[:, None] + (R // 2 + o)[None, :], m, 0.0)
    return b_a, b_b  # [ROWS, HALF] each


@triton.jit
def _store_pairs(
    p,
    b_a,
    b_b,
    m,
    b_factor,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    ROWS: tl.constexpr = b_a.shape[0]
    HALF: tl.constexpr = b_a.shape[1]
    if INTERLEAVED:
        o = tl.arange(0, 2 * HALF)
        b = tl.join(b_a, b_b).reshape(ROWS, 2 * HALF)
        _store(p[:, None] + o[None, :], b, m[:, None] & (o < R)[None, :], b_factor, NATIVE)
    else:
        o = tl.arange(0, HALF)
        m = m[:, None] & (o < R // 2)[None, :]
        _store(p[:, None] + o[None, :], b_a, m, b_factor, NATIVE)
        _store(p[:, None] + (R // 2 + o)[None, :], b_b, m, b_factor, NATIVE)


@triton.jit
def _load_rest(p, m, D: tl.constexpr, R: tl.constexpr, REST: tl.constexpr):
    """Return the dimensions of the rows at `p` that are not rotated."""
    o = R + tl.arange(0, REST)
    return tl.load(p[:, None] + o[None, :], m[:, None] & (o < D)[None, :], 0.0)


@triton.jit
def _store_rest(p, b_x, m, b_factor, D: tl.constexpr, R: tl.constexpr, NATIVE: tl.constexpr):
    o = R + tl.arange(0, b_x.shape[1])
    _store(p[:, None] + o[None, :], b_x, m[:, None] & (o < D)[None, :], b_factor, NATIVE)


@triton.jit
def _weighted(b_x, b_rms, b_w):
    """Apply the norm with the model's roundings: first the normalised value, then the product."""
    return ((b_x * b_rms[:, None]).to(b_w.dtype) * b_w).to(tl.float32)


@triton.jit
def _turn(
    p_in,
    p_out,
    p_cos,
    p_sin,
    b_scale,
    norm_ptr,
    eps,
    m_in,
    m_out,
    b_factor,
    D: tl.constexpr,
    R: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Normalise, rotate, scale and write heads; the pointers are those of the rows, [ROWS]."""
    b_a, b_b = _load_pairs(p_in, m_in, R, HALF, INTERLEAVED)
    b_a, b_b = b_a.to(tl.float32), b_b.to(tl.float32)
    o = tl.arange(0, HALF)
    m = m_in[:, None] & (o < R // 2)[None, :]
    b_cos = tl.load(p_cos[:, None] + o[None, :], m, 0.0)  # [ROWS, HALF]
    b_sin = tl.load(p_sin[:, None] + o[None, :], m, 0.0)
    if R < D:
        b_rest = _load_rest(p_in, m_in, D, R, REST).to(tl.float32)  # [ROWS, REST]
    if norm_ptr is not None:
        b_sum = tl.sum(b_a * b_a + b_b * b_b, 1)  # [ROWS]
        if R < D:
            b_sum += tl.sum(b_rest * b_rest, 1)
        b_rms = tl.rsqrt(b_sum / D + eps)
        p_norm = norm_ptr + tl.arange(0, 1)
        m_norm = tl.full([1], 1, tl.int1)
        b_wa, b_wb = _load_pairs(p_norm, m_norm, R, HALF, INTERLEAVED)
        b_a, b_b = _weighted(b_a, b_rms, b_wa), _weighted(b_b, b_rms, b_wb)
        if R < D:
            b_rest = _weighted(b_rest, b_rms, _load_rest(p_norm, m_norm, D, R, REST))
    if b_scale is not None:
        b_a, b_b = b_a * b_scale[:, None], b_b * b_scale[:, None]
        if R < D:
            b_rest *= b_scale[:, None]
    b_left = b_a * b_cos - b_b * b_sin
    b_right = b_b * b_cos + b_a * b_sin
    _store_pairs(p_out, b_left, b_right, m_out, b_factor, R, INTERLEAVED, NATIVE)
    if R < D:
        _store_rest(p_out, b_rest, m_out, b_factor, D, R, NATIVE)


@triton.jit
def _rows(i_tile, num_tokens, HEADS: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr):
    """Return token and head of each row of a tile, BH heads of each of ROWS / BH tokens."""
    GROUPS: tl.constexpr = (HEADS + BH - 1) // BH
    o = tl.arange(0, ROWS)
    o_token = (i_tile // GROUPS).to(tl.int64) * (ROWS // BH) + o // BH
    o_head = i_tile % GROUPS * BH + o % BH
    return o_token, o_head, (o_token < num_tokens) & (o_head < HEADS)


@triton.jit
def _factor(scale_ptr, o_head, m):
    """Return the factor applied to values before they are cached, None if the cache is not float8.

    One division per head instead of one per value: accurate to one float32 ulp.
    """
    if scale_ptr is not None:
        b_factor = 1.0 / tl.load(scale_ptr + o_head, m, 1.0)
    else:
        b_factor = None
    return b_factor


@triton.jit
def _of_token(scale_ptr, o_token, m):
    """Return the factor of each row's token, None if there are none."""
    if scale_ptr is not None:
        b_scale = tl.load(scale_ptr + o_token, m, 1.0)
    else:
        b_scale = None
    return b_scale


@triton.jit(do_not_specialize=["num_tokens"])
def rotary_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    query_scale_ptr,
    query_norm_ptr,
    key_norm_ptr,
    key_scale_ptr,
    value_scale_ptr,
    out_ptr,
    key_cache_ptr,
    value_cache_ptr,
    num_tokens,
    query_stride,
    key_stride,
    value_stride,
    eps,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
    BH: tl.constexpr,
    BHKV: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    DIM: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait(DEPENDENT)
    start_next(DEPENDENT)
    i_tile = tl.program_id(0)
    i_key = i_tile - tl.cdiv(num_tokens, ROWS // BH) * tl.cdiv(H, BH)
    i_value = i_key - tl.cdiv(num_tokens, ROWS // BHKV) * tl.cdiv(HKV, BHKV)
    if i_key < 0:
        o_token, o_head, m = _rows(i_tile, num_tokens, H, BH, ROWS)
        p_query = query_ptr + o_token * query_stride + o_head * D
        p_out = out_ptr + (o_token * H + o_head) * D
        p_cos, p_sin = cos_ptr + o_token * (R // 2), sin_ptr + o_token * (R // 2)
        _turn(
            p_query, p_out, p_cos, p_sin, _of_token(query_scale_ptr, o_token, m), query_norm_ptr,
            eps, m, m, None, D, R, HALF, REST, INTERLEAVED, NATIVE,
        )  # fmt: skip
    elif i_value < 0:
        o_token, o_head, m = _rows(i_key, num_tokens, HKV, BHKV, ROWS)
        b_slot = tl.load(slot_ptr + o_token, m, -1)
        p_key = key_ptr + o_token * key_stride + o_head * D
        p_cache = key_cache_ptr + (b_slot * HKV + o_head) * D
        p_cos, p_sin = cos_ptr + o_token * (R // 2), sin_ptr + o_token * (R // 2)
        _turn(
            p_key, p_cache, p_cos, p_sin, None, key_norm_ptr, eps, m, m & (b_slot >= 0),
            _factor(key_scale_ptr, o_head, m), D, R, HALF, REST, INTERLEAVED, NATIVE,
        )  # fmt: skip
    else:
        o_token, o_head, m = _rows(i_value, num_tokens, HKV, BHKV, ROWS)
        b_slot = tl.load(slot_ptr + o_token, m, -1)
        p_value = value_ptr + o_token * value_stride + o_head * D
        p_cache = value_cache_ptr + (b_slot * HKV + o_head) * D
        b_value = _load_rest(p_value, m, D, 0, DIM)
        _store_rest(
            p_cache, b_value, m & (b_slot >= 0), _factor(value_scale_ptr, o_head, m), D, 0, NATIVE
        )


def settings(query_heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    """Return tile sizes: as many heads of a token as fit into ROWS, then as many tokens."""
    dim = next_power_of_2(head_dim)
    rows = max(TILE // dim, 1)
    return {
        "ROWS": rows,
        "BH": _heads_per_tile(query_heads, rows),
        "BHKV": _heads_per_tile(kv_heads, rows),
        "HALF": next_power_of_2(rotary_dim // 2),
        "REST": next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 0,
        "DIM": dim,
        "num_warps": NUM_WARPS,
    }


def _heads_per_tile(heads: int, rows: int) -> int:
    """Return the largest power of two that leaves at most a quarter of the rows empty."""
    block = min(next_power_of_2(heads), rows)
    while 4 * heads < 3 * -(-heads // block) * block:
        block //= 2
    return block


def num_programs(tokens: int, heads: int, kv_heads: int, tiles: dict[str, int]) -> int:
    """Return the number of tiles: of queries, then of keys, then of values."""

    def count(heads: int, block: int) -> int:
        return -(-tokens // (tiles["ROWS"] // block)) * -(-heads // block)

    return count(heads, tiles["BH"]) + 2 * count(kv_heads, tiles["BHKV"])
