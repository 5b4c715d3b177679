"""The seam between models and attention kernels: a backend plans once per step."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from engine.execution.batch import Batch
from engine.execution.lazy_zeros import zeroed_on_demand
from kernels import cpu
from kernels import device as kernel_device

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig

# Name of a backend -> the module and the class that implement it, imported when it is asked for.
BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("engine.execution.cpu_attention", "CpuAttention"),
    "torch": ("engine.execution.torch_attention", "TorchAttention"),
    "triton": ("engine.execution.triton_attention", "TritonAttention"),
}


class LayerCache(NamedTuple):
    """Paged keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    Of the model's dtype, or float8_e4m3fn.
    """

    key: Tensor
    value: Tensor


class StepAttention(Protocol):
    """Attention of one step; the same object serves every layer."""

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        *,
        scale: float,
        sliding_window: int | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `query` [T, num_heads, head_dim] over the cached sequences.

        The step's own keys and values have been written to `cache` already. With a sliding window
        of w, position p sees positions p - w + 1 .. p. With a float8 cache, and only then,
        `key_scale` and `value_scale` are float32 [num_kv_heads]: what is stored is to be multiplied
        by them. Returns [T, num_heads, head_dim].
        """


class AttentionBackend(Protocol):
    """Prepares what every layer of a step shares (lengths, block runs, split plans)."""

    def check(self, config: ModelConfig, kv_cache_dtype: torch.dtype) -> None:
        """Raise `UnsupportedError` if it has no kernels for the heads of the model or the cache."""

    def plan(self, batch: Batch) -> StepAttention:
        """Return the attention of the step that `batch` describes."""


def attention_backend(
    device: torch.device, *, dtype: torch.dtype, block_size: int
) -> AttentionBackend:
    """Return the backend that serves queries of `dtype` on `device`.

    Args:
        block_size: tokens in a block of the KV cache.

    Raises:
        UnsupportedError: it has no kernels for such blocks.
    """
    module, name = BACKENDS[_backend_name(device, dtype)]
    backend: AttentionBackend = getattr(importlib.import_module(module), name)(block_size)
    return backend


def _backend_name(device: torch.device, dtype: torch.dtype) -> str:
    if kernel_device.has_triton(device):
        return "triton"
    query = torch.empty(0, dtype=dtype, device=device)
    return "torch" if cpu.fast_operations(query) is None else "cpu"


def allocate_kv_cache(
    config: ModelConfig,
    num_blocks: int,
    block_size: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> list[LayerCache]:
    """Return the zeroed KV cache of every layer, in all
    `num_blocks * block_size * config.kv_bytes_per_token(dtype)` bytes on `device`.

    `dtype` is that of the cache, which may be float8_e4m3fn.
    """
    shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
    zeros = zeroed_on_demand if device.type == "cpu" else partial(torch.zeros, device=device)
    return [
        LayerCache(key=zeros(shape, dtype=dtype), value=zeros(shape, dtype=dtype))
        for _ in range(config.num_layers)
    ]
