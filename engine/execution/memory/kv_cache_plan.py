"""Plans the size of the KV cache, and the longest sequence (`max_model_len`) that fits into it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import nn

from engine.core.kv.group_windows import GroupWindows, blocks_for
from engine.errors import InsufficientMemoryError
from engine.execution.devices import ResolvedConfig
from engine.execution.memory.gpu_memory_profile import (
    MemoryProfile,
    cache_fills_share,
    gib,
    gpu_share,
)
from engine.layers.rank_group import RankGroup
from engine.models.kv_groups import group_layers
from engine.models.spec import ModelSpec
from kernels.attention.paged_cache import FP8

# Share of the memory that is free after the weights are loaded; the rest is for activations, the
# server and other programs.
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
    """The size of the KV cache and the longest sequence that it serves.

    Attributes:
        num_blocks: including the null block.
        windows: of the groups of layers, between which the blocks are shared out.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_bytes: int
    windows: GroupWindows

    @property
    def num_tokens(self) -> int:
        """How many tokens there is room for, in sequences of `max_model_len`."""
        most = self.windows.sequence_blocks(self.max_model_len)
        rounded = blocks_for(self.max_model_len, self.block_size) * self.block_size
        return (self.num_blocks - 1) * rounded // most


def kv_cache_dtype(config: ResolvedConfig, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the KV cache of a model that computes in `dtype`."""
    return dtype if config.kv_cache_dtype == "auto" else FP8


def plan_kv_cache(
    config: ResolvedConfig,
    model_spec: ModelSpec,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    profile: MemoryProfile | None = None,
    group: RankGroup | None = None,
) -> KVCachePlan:
    """Size the KV cache after the weights have been loaded.

    No more blocks are planned than `max_num_seqs` sequences of full length can fill. A
    `max_model_len` that the user did not set is lowered to what fits.

    Args:
        max_model_len: the user's setting, or the model's context length.
        dtype: of the KV cache.
        profile: from `engine.execution.memory.gpu_memory_profile.profile_memory`, on a GPU.
        group: the ranks of which `model_spec` is one: all get as many blocks; None: it is alone.

    Raises:
        InsufficientMemoryError: the model leaves no memory for a KV cache; one sequence of the
            length asked for does not fit; or a cache of the size asked for does not.
    """
    assert (profile is None) == (device.type != "cuda")
    groups = group_layers(model_spec.sliding_windows, max_model_len)
    bytes_per_layer = model_spec.kv_bytes_per_token(dtype) // model_spec.num_layers
    bytes_per_block = bytes_per_layer * groups.num_caches * config.block_size
    most = config.max_num_batched_tokens
    most = min(most, config.long_prefill_token_threshold or most)
    windows = GroupWindows(groups.windows, config.block_size, max_step_tokens=most)
    free = _free_bytes(device) // model_spec.num_ranks if profile is None else profile.free
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        budget = config.kv_cache_memory_bytes or (
            int(free * _CPU_SHARE) if profile is None else min(free, _gpu_budget(config, profile))
        )
        useful = config.max_num_seqs * windows.sequence_blocks(max_model_len) + 1
        num_blocks = min(budget // bytes_per_block, useful)
    if group is not None:
        num_blocks = group.least(num_blocks)
    fitting_len = windows.longest_sequence(max(0, num_blocks - 1))
    if fitting_len < max_model_len:
        if config.max_model_len is not None or fitting_len < 2:
            needed = windows.sequence_blocks(max_model_len) * bytes_per_block
            raise InsufficientMemoryError(
                f"one sequence of {max_model_len} tokens needs {gib(needed)} of KV "
                f"cache, but only {max(0, num_blocks - 1)} blocks of {config.block_size} tokens "
                f"fit{_beside(profile)}; {_remedies(config, profile, fitting_len)}",
                param="max_model_len",
            )
        max_model_len = fitting_len
    num_bytes = num_blocks * bytes_per_block
    if free < num_bytes:  # happens only where the user set the size
        by_blocks = config.num_gpu_blocks_override is not None
        raise InsufficientMemoryError(
            f"a KV cache of "
            f"{gib(num_bytes)} does not fit into the {gib(free)} free on {device.type}"
            f"{_beside(profile)}; lower it",
            param="num_gpu_blocks_override" if by_blocks else "kv_cache_memory_bytes",
        )
    return KVCachePlan(num_blocks, config.block_size, max_model_len, num_bytes, windows)


def require_room_for_weights(num_bytes: int, device: torch.device, config: ResolvedConfig) -> None:
    """Raise `InsufficientMemoryError` if weights of `num_bytes` do not fit on `device`.

    On a GPU they must leave something of the share of `gpu_memory_utilization`, unless the size of
    the KV cache is given: that is known before they are loaded.
    """
    free = _free_bytes(device)
    if num_bytes > free:
        raise InsufficientMemoryError(
            f"the weights need {gib(num_bytes)}, but only {gib(free)} of memory is free on "
            f"{device.type}; choose a smaller model or dtype, or free some memory",
            param="model",
        )
    if device.type == "cuda" and cache_fills_share(config):
        total = torch.cuda.mem_get_info(device)[1]
        if num_bytes >= gpu_share(config, total):
            raise _model_too_large(config, num_bytes, total)


def require_room_for_tables(model: nn.Module, device: torch.device, max_model_len: int) -> None:
    """Raise `InsufficientMemoryError` if the rotary tables of `model` do not fit on `device`."""
    num_bytes, free = sum(buffer.nbytes for buffer in model.buffers()), _free_bytes(device)
    if num_bytes > free:
        raise InsufficientMemoryError(
            f"the rotary tables of {max_model_len} positions need {gib(num_bytes)}, "
            f"but only {gib(free)} of memory is free on {device.type}; lower it",
            param="max_model_len",
        )


def swap_space_bytes(config: ResolvedConfig, plan: KVCachePlan, device: torch.device) -> int:
    """Return the bytes of host memory for the KV of preempted sequences.

    Raises:
        InsufficientMemoryError: the host lacks them, on a CPU beside the KV cache of `plan`.
    """
    num_bytes = int(config.swap_space * 2**30)
    on_host = device.type == "cpu"
    free = max(0, _free_bytes(torch.device("cpu")) - (plan.num_bytes if on_host else 0))
    if num_bytes > free:
        raise InsufficientMemoryError(
            f"{gib(num_bytes)} does not fit into the {gib(free)} of the host's memory "
            f"that is free{' beside the KV cache' if on_host else ''}; lower it, or free some "
            "memory",
            param="swap_space",
        )
    return num_bytes


def _gpu_budget(config: ResolvedConfig, profile: MemoryProfile) -> int:
    """Return the bytes left for the KV cache in the share of this process."""
    share = gpu_share(config, profile.total)
    if profile.fixed >= share:
        raise _model_too_large(config, profile.fixed, profile.total)
    budget = share - profile.fixed - profile.activations
    if budget <= 0:
        raise InsufficientMemoryError(
            f"a step of {config.max_num_batched_tokens} tokens takes "
            f"{gib(profile.activations)} beside {gib(profile.fixed)} of the model, which "
            f"leaves no KV cache of {_share_text(config, profile.total)}; lower "
            "max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization",
            param="max_num_batched_tokens",
        )
    return budget


def _model_too_large(config: ResolvedConfig, num_bytes: int, total: int) -> InsufficientMemoryError:
    return InsufficientMemoryError(
        f"the weights take {gib(num_bytes)}, which leaves nothing of {_share_text(config, total)}; "
        "choose a smaller model or dtype, or raise gpu_memory_utilization",
        param="model",
    )


def _share_text(config: ResolvedConfig, total: int) -> str:
    return (
        f"the {gib(gpu_share(config, total))} that gpu_memory_utilization "
        f"{config.gpu_memory_utilization:g} gives of {gib(total)}"
    )


def _beside(profile: MemoryProfile | None) -> str:
    if profile is None:
        return ""
    return (
        f" beside {gib(profile.fixed)} of the model and {gib(profile.activations)} of activations"
    )


def _remedies(config: ResolvedConfig, profile: MemoryProfile | None, fitting_len: int) -> str:
    """Return, for the error, which settings help if one sequence does not fit."""
    found = [f"lower max_model_len to at most {fitting_len}"] if fitting_len >= 2 else []
    if config.num_gpu_blocks_override is not None:
        return " or ".join([*found, "raise num_gpu_blocks_override"])
    if profile is None or config.kv_cache_memory_bytes is not None:
        found.append("raise kv_cache_memory_bytes")
    else:
        found += ["raise gpu_memory_utilization", "lower max_num_batched_tokens"]
    if profile is not None and config.kv_cache_dtype == "auto":
        found.append("set kv_cache_dtype to fp8")
    return " or ".join(found)


def _free_bytes(device: torch.device) -> int:
    if device.type == "meta":  # that of the null device, whose tensors take no memory
        return 2**62
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
    """Return one figure of a cgroup's memory.stat, such as reclaimable cached files."""
    figures = dict(line.split() for line in path.read_text().splitlines())
    return int(figures[name])
