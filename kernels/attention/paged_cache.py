"""Checks of the paged KV cache that its kernels share: dtypes, shapes and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import e4m3
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)

FP8 = e4m3.FP8
BLOCK_SIZES = (16, 32, 64)  # tokens per block that attention has tiles for
MAX_GROUP = 16  # query heads that share a KV head in decode


def check_caches(
    key_cache: Tensor, value_cache: Tensor, like: Tensor, num_kv_heads: int | None
) -> None:
    """Raise unless both caches are contiguous [num_blocks, block_size, num_kv_heads, D].

    D, device and dtype must equal those of `like`, [..., D]; the dtype may also be float8_e4m3fn.
    """
    check_dtype("key_cache", key_cache, like.dtype, FP8)
    check_device("key_cache", key_cache, like.device)
    check_like("value_cache", value_cache, key_cache)
    check_shape("key_cache", key_cache, (None, None, num_kv_heads, like.shape[-1]))
    check_shape("value_cache", value_cache, tuple(key_cache.shape))
    check_contiguous("key_cache", key_cache)
    check_contiguous("value_cache", value_cache)


def check_scale(name: str, scale: Tensor, cache: Tensor) -> None:
    """Raise unless `scale` is float32, contiguous, with one value for each KV head of `cache`."""
    check_dtype(name, scale, torch.float32)
    check_shape(name, scale, (cache.shape[2],))
    check_device(name, scale, cache.device)
    check_contiguous(name, scale)


def check_query(query: Tensor, out: Tensor | None) -> None:
    """Raise unless the attention kernels support `query`, [any, H, D], and `out` matches it."""
    check_dtype("query", query, *FLOATS)
    check_shape("query", query, (None, None, None))
    check_last_stride("query", query)
    dim = query.shape[2]
    if dim % 16 or not 32 <= dim <= 256:
        raise ValueError(
            f"query: the head dimension must be a multiple of 16 from 32 to 256 (got {dim})"
        )
    if out is not None:
        check_shape("out", out, tuple(query.shape))
        check_like("out", out, query)
        check_last_stride("out", out)
