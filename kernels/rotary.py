"""QK-norm, rotary embedding and the KV cache write: all between the qkv projection and attention.

Queries and keys are normalised (QK-norm, Dehghani et al., 2023; optional) and rotated by their
positions (RoPE, Su et al., 2021); keys and values are written to the paged cache, optionally as
float8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import cpu, dependent_launch, device
from kernels.attention.paged_cache import FP8, check_caches, check_scale
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_like,
    check_shape,
)
from kernels.dependent_launch import start_next, wait
from kernels.device import next_power_of_2
from kernels.e4m3 import FP8_MAX, to_e4m3
from kernels.rms_norm import reference as norm_reference
from kernels.rms_norm import rms_norm


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """Rotate queries and keys, and write the keys and values to their slots of the cache.

    Changes only the given slots of `key_cache` and `value_cache`, in place. Slots must be distinct
    and within the cache; this is not checked.

    Args:
        query: float [T, H, D], D even. The heads of a token are contiguous; tokens may be strided,
            as in views of a fused projection. The same holds for `key` and `value`.
        key, value: [T, Hkv, D], of the dtype of `query`.
        cos, sin: float32 [T, R / 2], contiguous: the rows of the rotary table at the tokens'
            positions. The first R <= D dimensions are rotated, the rest are copied.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], contiguous, of the dtype of
            `query` or float8_e4m3fn.
        slot_mapping: int64 [T], block id * block_size + offset of each token, or -1 for padding,
            which is not cached.
        query_norm, key_norm: [D], of the dtype of `query`: the weights of an RMS norm over each
            head, before the rotation; computed in float32, rounded, then weighted.
        norm_eps: added to the mean squares.
        interleaved: rotate dimension 2i with 2i + 1 (GPT-J, the original Llama), not i with
            i + R / 2 (GPT-NeoX and the checkpoints of Hugging Face).
        query_scale: float32 [T], contiguous: factors of the queries; None: 1.
        key_scale, value_scale: float32 [Hkv], with float8 caches only: the cached value is
            float32 value / scale, saturated to +-448 and rounded to nearest even.

    Returns:
        The rotated queries [T, H, D], contiguous, padding tokens included.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device, or is missing.
    """
    _check_heads(query, key, value)
    _check_angles(query, cos, sin)
    _check_query_scale(query, query_scale)
    _check_norms(query, query_norm, key_norm)
    _check_caches(key, key_cache, value_cache, slot_mapping)
    _check_scales(key_cache, key_scale, value_scale)
    if not device.runs_triton(query):
        fast = cpu.fast_operations(query)
        if fast is not None and key_scale is None:
            rotated: Tensor = fast.rotary_and_cache(
                query,
                key,
                value,
                cos,
                sin,
                key_cache,
                value_cache,
                slot_mapping,
                query_norm,
                key_norm,
                norm_eps,
                interleaved,
                query_scale,
            )
            return rotated
        if query_norm is not None:
            query = rms_norm(query, query_norm, norm_eps)
        if key_norm is not None:
            key = rms_norm(key, key_norm, norm_eps)
        if key_scale is not None:  # rounded once, from float32
            key, value = key.float(), value.float()
        _write(key_cache, slot_mapping, _rotate(key, cos, sin, interleaved), key_scale)
        _write(value_cache, slot_mapping, value, value_scale)
        return _rotate(query, cos, sin, interleaved, query_scale)
    tokens, heads, dim = query.shape
    kv_heads, rotary_dim = key.shape[1], 2 * cos.shape[1]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    tiles = settings(heads, kv_heads, dim, rotary_dim)
    if not tokens:
        return out
    rotary_kernel[(num_programs(tokens, heads, kv_heads, tiles),)](
        query_ptr=query,
        key_ptr=key,
        value_ptr=value,
        cos_ptr=cos,
        sin_ptr=sin,
        slot_ptr=slot_mapping,
        query_scale_ptr=query_scale,
        query_norm_ptr=query_norm,
        key_norm_ptr=key_norm,
        key_scale_ptr=key_scale,
        value_scale_ptr=value_scale,
        out_ptr=out,
        key_cache_ptr=_storage(key_cache),
        value_cache_ptr=_storage(value_cache),
        num_tokens=tokens,
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        eps=norm_eps,
        H=heads,
        HKV=kv_heads,
        D=dim,
        R=rotary_dim,
        INTERLEAVED=interleaved,
        NATIVE=device.converts_fp8(query.device),
        **tiles,
        **dependent_launch.options(query.device),
    )
    return out


def reference(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    interleaved: bool = False,
    scale: Tensor | None = None,
) -> Tensor:
    """Return the heads `x` [T, heads, D] normalised, rotated and scaled, in float32 throughout."""
    wide = x.float() if norm is None else norm_reference(x, norm, norm_eps)
    return _rotate(wide, cos, sin, interleaved, scale)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: Tensor | None = None
) -> Tensor:
    """Rotate [T, heads, D] by the angles of [T, R / 2], and scale by [T]; float32 inside."""
    size = 2 * cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = x.new_empty(x.shape)
    wide = x.float() if scale is None else x.float() * scale[:, None, None]
    first, second = _pairs(wide, size, interleaved)
    left, right = _pairs(rotated, size, interleaved)
    left.copy_(first * cos - second * sin)
    right.copy_(second * cos + first * sin)
    if size < x.shape[-1]:
        rotated[..., size:] = wide[..., size:]
    return rotated


def _pairs(x: Tensor, size: int, interleaved: bool) -> tuple[Tensor, ...]:
    """Return views of both members of each pair among the first `size` dimensions."""
    x = x[..., :size] if size < x.shape[-1] else x
    return x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)


def _write(cache: Tensor, slots: Tensor, rows: Tensor, scale: Tensor | None) -> None:
    """Write [T, Hkv, D] to the slots of a cache on the CPU."""
    if scale is not None:
        rows = (rows / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
    if slots.numel() and int(slots.min()) < 0:
        real = slots >= 0
        slots, rows = slots[real], rows[real]
    _storage(cache).flatten(0, 1).index_copy_(0, slots, rows)


def _storage(cache: Tensor) -> Tensor:
    """Return a float8 cache viewed as bytes, since not every GPU supports the dtype."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


def _check_heads(query: Tensor, key: Tensor, value: Tensor) -> None:
    check_dtype("query", query, *FLOATS)
    check_shape("query", query, (None, None, None))
    tokens, heads, dim = query.shape
    if dim % 2 or not dim:
        raise ValueError(f"query: the last dimension must be even and positive (got {dim})")
    check_shape("key", key, (tokens, None, dim))
    if not heads or not key.shape[1]:
        raise ValueError(f"{'key' if heads else 'query'}: must have a dimension of heads")
    check_shape("value", value, (tokens, key.shape[1], dim))
    check_like("key", key, query)
    check_like("value", value, query)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        stride = tensor.stride()
        if stride[2] != 1 or (stride[1] != dim and tensor.shape[1] > 1):
            raise ValueError(
                f"{name}: the heads of a token must lie side by side, each contiguous"
                f" (got strides {list(stride)})"
            )


def _check_angles(query: Tensor, cos: Tensor, sin: Tensor) -> None:
    tokens, _, dim = query.shape
    check_shape("cos", cos, (tokens, None))
    if not 2 <= 2 * cos.shape[1] <= dim:
        raise ValueError(f"cos: must have 1 to {dim // 2} columns (got shape {list(cos.shape)})")
    check_shape("sin", sin, tuple(cos.shape))
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, torch.float32)
        check_device(name, tensor, query.device)
        check_contiguous(name, tensor)


def _check_query_scale(query: Tensor, scale: Tensor | None) -> None:
    if scale is not None:
        check_shape("query_scale", scale, (len(query),))
        check_dtype("query_scale", scale, torch.float32)
        check_device("query_scale", scale, query.device)
        check_contiguous("query_scale", scale)


def _check_norms(query: Tensor, query_norm: Tensor | None, key_norm: Tensor | None) -> None:
    for name, weight in (("query_norm", query_norm), ("key_norm", key_norm)):
        if weight is not None:
            check_shape(name, weight, (query.shape[2],))
            check_like(name, weight, query)
            check_contiguous(name, weight)


def _check_caches(
    key: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    tokens, kv_heads, _ = key.shape
    check_caches(key_cache, value_cache, key, kv_heads)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("slot_mapping", slot_mapping, (tokens,))
    check_device("slot_mapping", slot_mapping, key.device)
    check_contiguous("slot_mapping", slot_mapping)


def _check_scales(cache: Tensor, key_scale: Tensor | None, value_scale: Tensor | None) -> None:
    for name, scale in (("key_scale", key_scale), ("value_scale", value_scale)):
        if (scale is not None) != (cache.dtype == FP8):
            raise ValueError(f"{name}: is required with float8 caches, and not allowed with others")
        if scale is not None:
            check_scale(name, scale, cache)


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
