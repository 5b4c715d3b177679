"""QK-norm, rotary embedding and the KV cache write: all between the qkv projection and attention.

Queries and keys are normalised (QK-norm, Dehghani et al., 2023; optional) and rotated by their
positions (RoPE, Su et al., 2021); keys and values are written to the paged cache, optionally as
float8. The kernel is in `kernels.rotary_kernel`.
"""

from __future__ import annotations

import torch
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
from kernels.e4m3 import FP8_MAX
from kernels.rms_norm import reference as norm_reference
from kernels.rms_norm import rms_norm
from kernels.rotary_kernel import num_programs, rotary_kernel, settings


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
        raise ValueError(f"{'key' if heads else 'query'}: must have heads")
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
            raise ValueError(f"{name}: goes with float8 caches, and only with them")
        if scale is not None:
            check_scale(name, scale, cache)
