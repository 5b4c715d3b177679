"""Rotary embedding of queries and keys, fused with writing keys and values to the paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import FLOATS, check_device, check_dtype, check_like, check_shape


def rotary_and_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Rotate queries and keys, and write the keys and values to their slots of the cache.

    Changes `key_cache` and `value_cache` in place, nothing else. Dimension i is rotated with
    i + D / 2, the convention of Hugging Face checkpoints.

    Args:
        query: float [T, H, D].
        key, value: [T, Hkv, D], of the dtype of `query`.
        cos, sin: float32 [T, D / 2], the rows of the rotary table at the tokens' positions.
        key_cache, value_cache: [num_blocks, block_size, Hkv, D], of the dtype of `query`.
        slot_mapping: int64 [T], block id * block_size + offset of each token.

    Returns:
        The rotated queries [T, H, D].

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    _check(query, key, value, cos, sin, key_cache, value_cache, slot_mapping)
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, _rotate(key, cos, sin))
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
    return _rotate(query, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, D] by the angles of [T, D / 2]; float32 inside."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = x.new_empty(x.shape)
    half = x.shape[-1] // 2
    rotated[..., :half] = first * cos - second * sin
    rotated[..., half:] = second * cos + first * sin
    return rotated


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
) -> None:
    check_dtype("query", query, *FLOATS)
    check_shape("query", query, (None, None, None))
    tokens, _, dim = query.shape
    if dim % 2:
        raise ValueError(f"query: the last dimension must be even (got {dim})")
    check_shape("key", key, (tokens, None, dim))
    kv_heads = key.shape[1]
    check_shape("value", value, (tokens, kv_heads, dim))
    check_shape("key_cache", key_cache, (None, None, kv_heads, dim))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    for name, tensor in (
        ("key", key),
        ("value", value),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
    ):
        check_like(name, tensor, query)
    for name, tensor in (("cos", cos), ("sin", sin)):
        check_dtype(name, tensor, torch.float32)
        check_shape(name, tensor, (tokens, dim // 2))
        check_device(name, tensor, query.device)
    # A copy would be written to instead of the cache.
    for name, tensor in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous")
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("slot_mapping", slot_mapping, (tokens,))
    check_device("slot_mapping", slot_mapping, query.device)
