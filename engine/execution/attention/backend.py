"""The attention backends, one per kind of device: each plans the attention of a step once."""

from __future__ import annotations

import importlib
from typing import Protocol

import torch

from engine.layers.attention import StepAttention
from engine.models.batch import Batch
from kernels import cpu
from kernels import device as kernel_device

# Name of a backend -> the module and the class that implement it, imported on first use.
BACKENDS: dict[str, tuple[str, str]] = {
    "cpu": ("engine.execution.attention.cpu_attention", "CpuAttention"),
    "cpu-invariant": ("engine.execution.attention.cpu_attention", "InvariantCpuAttention"),
    "invariant": ("engine.execution.attention.invariant_attention", "InvariantAttention"),
    "torch": ("engine.execution.attention.torch_attention", "TorchAttention"),
    "triton": ("engine.execution.attention.triton_attention", "TritonAttention"),
}


class AttentionBackend(Protocol):
    """Plans per step what all its layers share (lengths, block runs, splits)."""

    def check(
        self, *, num_heads: int, num_kv_heads: int, head_dim: int, kv_cache_dtype: torch.dtype
    ) -> None:
        """Raise `UnsupportedError` if it has no kernels for these heads or this type of cache."""

    def plan(self, batch: Batch) -> StepAttention:
        """Return the attention of the step that `batch` describes."""


def attention_backend(
    device: torch.device, *, dtype: torch.dtype, block_size: int, deterministic: bool = False
) -> AttentionBackend:
    """Return the backend that serves queries of `dtype` on `device`.

    Args:
        block_size: tokens in a block of the KV cache.
        deterministic: as in `EngineConfig`.

    Raises:
        UnsupportedError: it has no kernels for such blocks.
    """
    module, name = BACKENDS[_backend_name(device, dtype, deterministic)]
    backend: AttentionBackend = getattr(importlib.import_module(module), name)(block_size)
    return backend


def _backend_name(device: torch.device, dtype: torch.dtype, deterministic: bool) -> str:
    if kernel_device.has_triton(device):
        return "invariant" if deterministic else "triton"
    query = torch.empty(0, dtype=dtype, device=device)
    if deterministic and cpu.operations(query) is not None:
        return "cpu-invariant"
    return "torch" if cpu.fast_operations(query) is None else "cpu"
