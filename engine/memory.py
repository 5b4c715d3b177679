"""How much KV cache there is room for, and how long a sequence may then become."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from engine.config import EngineConfig
from engine.core.kv_cache_manager import blocks_for
from engine.errors import InsufficientMemoryError
from engine.models.config import ModelConfig

# Of the memory that is free once the weights are loaded; the rest is for activations, the
# server and the machine's other programs.
_CPU_SHARE = 0.5

# Where a container's limit and usage are: cgroup v2, then v1.
_CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of the KV cache and the longest sequence that it serves."""

    num_blocks: int  # the null block among them
    block_size: int
    max_model_len: int
    num_bytes: int


def plan_kv_cache(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVCachePlan:
    """Size the KV cache after the weights have been loaded.

    No more blocks are planned than `max_num_seqs` sequences of full length can fill. Where the
    user did not ask for a `max_model_len`, it is lowered to what fits.

    Raises:
        InsufficientMemoryError: one sequence of the length asked for does not fit, or a cache of
            the size asked for does not.
    """
    bytes_per_block = model_config.kv_bytes_per_token(dtype) * config.block_size
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        budget = config.kv_cache_memory_bytes or _kv_cache_budget(config, device)
        useful = config.max_num_seqs * blocks_for(max_model_len, config.block_size) + 1
        num_blocks = min(budget // bytes_per_block, useful)
    fitting_len = max(0, num_blocks - 1) * config.block_size
    if fitting_len < max_model_len:
        if config.max_model_len is not None or fitting_len < 2:
            raise InsufficientMemoryError(
                f"max_model_len: one sequence of {max_model_len} tokens needs "
                f"{_gib(blocks_for(max_model_len, config.block_size) * bytes_per_block)} of KV "
                f"cache, but only {max(0, num_blocks - 1)} blocks of {config.block_size} tokens "
                f"fit; lower max_model_len to at most {fitting_len}, or raise "
                "kv_cache_memory_bytes or num_gpu_blocks_override"
            )
        max_model_len = fitting_len
    num_bytes = num_blocks * bytes_per_block
    if (free := _free_bytes(device)) < num_bytes:  # happens only where the user set the size
        by_blocks = config.num_gpu_blocks_override is not None
        raise InsufficientMemoryError(
            f"{'num_gpu_blocks_override' if by_blocks else 'kv_cache_memory_bytes'}: a KV cache of "
            f"{_gib(num_bytes)} does not fit into the {_gib(free)} free on {device.type}"
        )
    return KVCachePlan(num_blocks, config.block_size, max_model_len, num_bytes)


def require_room_for_weights(num_bytes: int, device: torch.device) -> None:
    """Raise `InsufficientMemoryError` if weights of `num_bytes` do not fit on `device`."""
    free = _free_bytes(device)
    if num_bytes > free:
        raise InsufficientMemoryError(
            f"model: its weights need {_gib(num_bytes)}, but only {_gib(free)} of memory is free "
            f"on {device.type}; choose a smaller model or dtype, or free some memory"
        )


def _kv_cache_budget(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(total * config.gpu_memory_utilization) - (total - free))
    return int(_free_bytes(device) * _CPU_SHARE)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    for folder, limit, usage, reclaimable in _CGROUPS:
        # A container's limit is not in /proc/meminfo; "max" means that there is none.
        if (folder / limit).exists() and (text := (folder / limit).read_text().strip()) != "max":
            used = int((folder / usage).read_text()) - _stat(folder / "memory.stat", reclaimable)
            free = min(free, max(0, int(text) - used))
    return free


def _stat(path: Path, name: str) -> int:
    """Return one figure of a cgroup's memory.stat: cached files are given up when needed."""
    figures = dict(line.split() for line in path.read_text().splitlines())
    return int(figures[name])


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
