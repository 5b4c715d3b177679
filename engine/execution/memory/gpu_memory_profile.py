"""GPU memory use, measured before a model is loaded and in a profiling run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import InsufficientMemoryError
from engine.execution.devices import ResolvedConfig
from engine.execution.memory.step_memory import is_out_of_memory


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The memory of a GPU at one moment, in bytes.

    Attributes:
        total: memory of the device.
        free: of it, memory that no process holds.
        reserved: memory held by torch's allocator for tensors of this process.
    """

    total: int
    free: int
    reserved: int


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What this process needs of a GPU's memory besides the KV cache, in bytes.

    What torch's allocator has reserved counts, not what tensors take of it: segments that are only
    partly used are lost to the KV cache too.

    Attributes:
        total: memory of the device.
        weights: reserved before the first step: the model, and tables of the engine.
        activations: peak of the largest step beside them, with tables that requests allocate later.
        graphs: CUDA graphs: their memory pool, and what the driver keeps for them.
        libraries: not torch's: kernels, handles and workspaces of libraries.
        free: free memory of the device at the peak and with the graphs, beside other processes.
    """

    total: int
    weights: int
    activations: int
    graphs: int
    libraries: int
    free: int

    @property
    def fixed(self) -> int:
        """What is taken even while no step runs."""
        return self.weights + self.libraries + self.graphs

    @property
    def summary(self) -> str:
        """The figures as text for the user."""
        return (
            f"the model takes {gib(self.weights)}, libraries {gib(self.libraries)}, CUDA graphs "
            f"{gib(self.graphs)} and the largest step {gib(self.activations)} of {gib(self.total)}"
        )


def memory_before_loading(config: ResolvedConfig, device: torch.device) -> MemorySnapshot | None:
    """Return a snapshot of `device` before the weights are loaded, None if it is not a GPU.

    Raises:
        InsufficientMemoryError: other processes hold so much that the share of
            `gpu_memory_utilization` is not free. A smaller share is not taken silently: memory of
            a process that is still ending would leave this one with a small cache for good.
    """
    if device.type != "cuda":
        return None
    before = take_snapshot(device)
    share = gpu_share(config, before.total)
    if cache_fills_share(config) and before.free < share:
        raise InsufficientMemoryError(
            f"{config.gpu_memory_utilization:g} of {gib(before.total)} is {gib(share)}, but only "
            f"{gib(before.free)} of memory is free on {device}; end other programs on it, or lower "
            f"gpu_memory_utilization to at most {int(100 * before.free / before.total) / 100:g}",
            param="gpu_memory_utilization",
        )
    return before


def profile_memory(
    config: ResolvedConfig,
    before: MemorySnapshot,
    run_profile: Callable[[], None],
    capture_graphs: Callable[[], float] | None,
    device: torch.device,
) -> MemoryProfile:
    """Measure the memory of the loaded model during the largest possible step, and of its graphs.

    Args:
        before: from `memory_before_loading`.
        run_profile: runs such a step: `max_num_batched_tokens` tokens, logits and sampler of
            `max_num_seqs` rows.
        capture_graphs: captures some of the CUDA graphs, keeps them, and returns how many times as
            many there will be; None: they are not measured. They hold the addresses of the KV
            cache, which is allocated after this: so each graph that is captured here has to be
            captured again. They take as much memory with a small cache as with a large one.

    Raises:
        InsufficientMemoryError: there is no memory for the step itself, or for the graphs.
    """
    loaded = take_snapshot(device)
    torch.cuda.reset_peak_memory_stats(device)
    weights = loaded.reserved - before.reserved
    try:
        run_profile()
        torch.cuda.synchronize(device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InsufficientMemoryError(
            f"a step of {config.max_num_batched_tokens} tokens does not "
            f"fit into the {gib(loaded.free)} of memory free on {device} beside {gib(weights)} of "
            "weights; lower max_num_batched_tokens or max_num_seqs",
            param="max_num_batched_tokens",
        ) from None
    peak = torch.cuda.max_memory_reserved(device)
    after = take_snapshot(device)
    ratio = 1.0 if capture_graphs is None else capture_graphs()
    captured = after if capture_graphs is None else take_snapshot(device)
    # All graphs share the pool, which is as large as the largest of them needs. What the driver
    # keeps grows with their number. Other processes may free memory meanwhile.
    pool = captured.reserved - after.reserved
    of_driver = max(0, after.free - captured.free - pool)
    missing = int((ratio - 1) * of_driver)
    return MemoryProfile(
        total=after.total,
        weights=weights,
        activations=peak - loaded.reserved,
        graphs=pool + of_driver + missing,
        # Negative if another process has freed memory meanwhile.
        libraries=max(0, (before.free - after.free) - (after.reserved - before.reserved)),
        free=max(0, captured.free - missing - (peak - after.reserved)),
    )


def cache_fills_share(config: ResolvedConfig) -> bool:
    """Whether `gpu_memory_utilization` decides the size of the KV cache, not a given size."""
    return config.kv_cache_memory_bytes is None and config.num_gpu_blocks_override is None


def gpu_share(config: ResolvedConfig, total: int) -> int:
    """Return the bytes of a GPU's `total` that this process may use."""
    return int(total * config.gpu_memory_utilization)


def gib(num_bytes: int) -> str:
    """Return a number of bytes as text for the user; a small one in MiB, not as 0.00 GiB."""
    if 0 < num_bytes < 2**30 // 10:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / 2**30:.2f} GiB"


def take_snapshot(device: torch.device) -> MemorySnapshot:
    """Return a snapshot after torch's allocator has freed what it caches."""
    torch.cuda.synchronize(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return MemorySnapshot(
        total=total,
        free=free,
        reserved=torch.cuda.memory_reserved(device),
    )
