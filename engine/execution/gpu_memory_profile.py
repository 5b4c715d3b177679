"""What a model takes of a GPU's memory, measured: before it is loaded, and in a profiling run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import InsufficientMemoryError


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory of a GPU at one moment, in bytes.

    Attributes:
        total: what the device has.
        free: what no process holds of it.
        allocated: tensors of this process.
        reserved: what torch's allocator holds for them, with what it keeps for later.
    """

    total: int
    free: int
    allocated: int
    reserved: int


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What this process needs of a GPU's memory besides the KV cache, in bytes.

    Attributes:
        total: what the device has.
        weights: tensors that were there before the first step: the model, and tables of the engine.
        activations: what the largest step takes beside them, at its peak.
        libraries: what is not torch's: kernels, handles and workspaces of libraries.
        free: what is left on the device at that peak, other processes being as they are.
    """

    total: int
    weights: int
    activations: int
    libraries: int
    free: int

    @property
    def summary(self) -> str:
        """The figures as text for the user."""
        return (
            f"the model takes {gib(self.weights)}, libraries {gib(self.libraries)} and the largest "
            f"step {gib(self.activations)} of {gib(self.total)}"
        )


def memory_before_loading(config: EngineConfig, device: torch.device) -> MemorySnapshot | None:
    """Return how things stand on `device` before the weights are loaded, None if it is no GPU.

    Raises:
        InsufficientMemoryError: others hold so much that the share which `gpu_memory_utilization`
            asks for is not free. A smaller share is not taken silently: a process that is just
            ending would leave its successor with a cache that stays small.
    """
    if device.type != "cuda":
        return None
    before = _snapshot(device)
    share = gpu_share(config, before.total)
    if cache_fills_share(config) and before.free < share:
        raise InsufficientMemoryError(
            f"gpu_memory_utilization: {config.gpu_memory_utilization:g} of {gib(before.total)} is "
            f"{gib(share)}, but only {gib(before.free)} of memory is free on {device}; end what "
            "else uses it, or lower gpu_memory_utilization to at most "
            f"{int(100 * before.free / before.total) / 100:g}"
        )
    return before


def profile_memory(
    config: EngineConfig,
    before: MemorySnapshot,
    run_profile: Callable[[], None],
    device: torch.device,
) -> MemoryProfile:
    """Measure what the loaded model takes while it runs the largest step that can come.

    Args:
        before: of `memory_before_loading`.
        run_profile: runs such a step once: `max_num_batched_tokens` tokens, logits and sampler of
            `max_num_seqs` rows.

    Raises:
        InsufficientMemoryError: the step itself finds no memory.
    """
    loaded = _snapshot(device)
    torch.cuda.reset_peak_memory_stats(device)
    weights = loaded.allocated - before.allocated
    try:
        run_profile()
        torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise InsufficientMemoryError(
            f"max_num_batched_tokens: a step of {config.max_num_batched_tokens} tokens does not "
            f"fit into the {gib(loaded.free)} of memory free on {device} beside {gib(weights)} of "
            "weights; lower max_num_batched_tokens or max_num_seqs"
        ) from None
    peak = torch.cuda.max_memory_allocated(device)
    after = _snapshot(device)
    return MemoryProfile(
        total=after.total,
        weights=weights,
        activations=peak - loaded.allocated,
        # Below zero where another process has given memory back meanwhile.
        libraries=max(0, (before.free - after.free) - (after.reserved - before.reserved)),
        free=max(0, after.free - (peak - after.allocated)),
    )


def cache_fills_share(config: EngineConfig) -> bool:
    """Tell whether the KV cache gets what `gpu_memory_utilization` leaves, and no given size."""
    return config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None


def gpu_share(config: EngineConfig, total: int) -> int:
    """Return the bytes that this process may take of a GPU's `total`."""
    return int(total * config.gpu_memory_utilization)


def gib(num_bytes: int) -> str:
    """Return a number of bytes as text for the user."""
    return f"{num_bytes / 2**30:.2f} GiB"


def _snapshot(device: torch.device) -> MemorySnapshot:
    """Return how things stand once torch's allocator has given back what it holds without need."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemorySnapshot(
        total=total,
        free=free,
        allocated=torch.cuda.memory_allocated(device),
        reserved=torch.cuda.memory_reserved(device),
    )
