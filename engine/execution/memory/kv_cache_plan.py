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

# Of what is left for the KV cache beside the states of running sequences, that for checkpoints.
_CHECKPOINT_SHARE = 0.2

# Checkpoints are after multiples of a number of tokens that is at least this.
_LEAST_INTERVAL = 64

# Of the KV of a sequence, the share that checkpoints within its prompt may take: one in so many.
_PART_IN_PROMPT = 8

# Beside those of running sequences: the null block, and one that a sequence begins with.
_OTHER_STATES = 2

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
class StatePlan:
    """How many states there is room for, and where checkpoints of them pay.

    Attributes:
        num_blocks: including the null block.
        num_bytes: of all.
        interval: checkpoints are after multiples of so many tokens.
        every: of which those within a prompt pay for their memory; a multiple of `interval`.
    """

    num_blocks: int
    num_bytes: int
    interval: int
    every: int


@dataclass(frozen=True, slots=True)
class KVCachePlan:
    """The size of the KV cache and the longest sequence that it serves.

    Attributes:
        num_blocks: including the null block.
        num_bytes: of KV and states.
        windows: of the groups of layers, between which the blocks are shared out.
        max_num_seqs: sequences at most that run at a time.
        states: of the layers that keep states; None: none does.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    num_bytes: int
    windows: GroupWindows
    max_num_seqs: int
    states: StatePlan | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes without those of the states."""
        return self.num_bytes - (0 if self.states is None else self.states.num_bytes)

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
    model_dtype: torch.dtype,
    device: torch.device,
    profile: MemoryProfile | None = None,
    group: RankGroup | None = None,
    may_lower_seqs: bool = False,
) -> KVCachePlan:
    """Size the KV cache after the weights have been loaded.

    No more blocks are planned than `max_num_seqs` sequences of full length can fill. A
    `max_model_len` that the user did not set is lowered to what fits; so is `max_num_seqs`, if
    states of so many sequences would take more than half of the memory.

    Args:
        max_model_len: the user's setting, or the model's context length.
        dtype: of the KV cache.
        model_dtype: of the activations.
        profile: from `engine.execution.memory.gpu_memory_profile.profile_memory`, on a GPU.
        group: the ranks of which `model_spec` is one: all get as many blocks; None: it is alone.
        may_lower_seqs: the user did not set `max_num_seqs`.

    Raises:
        InsufficientMemoryError: the model leaves no memory for a KV cache, or for states; one
            sequence of the length asked for does not fit; or a cache of the size asked for does
            not.
    """
    assert (profile is None) == (device.type != "cuda")
    groups = group_layers(model_spec.sliding_windows, max_model_len)
    bytes_per_layer = model_spec.kv_bytes_per_token(dtype) // len(model_spec.attentions)
    bytes_per_block = bytes_per_layer * groups.num_caches * config.block_size
    most = config.max_num_batched_tokens
    most = min(most, config.long_prefill_token_threshold or most)
    windows = GroupWindows(groups.windows, config.block_size, max_step_tokens=most)
    free = _free_bytes(device) // model_spec.num_ranks if profile is None else profile.free
    sets_blocks = config.num_gpu_blocks_override is not None
    budget, max_num_seqs, states = 0, config.max_num_seqs, None
    if model_spec.state_shapes or not sets_blocks:
        budget = config.kv_cache_memory_bytes or (
            int(free * _CPU_SHARE) if profile is None else min(free, _gpu_budget(config, profile))
        )
    if model_spec.state_shapes:
        state_bytes = model_spec.state_bytes(model_dtype)
        max_num_seqs = _running_states(config, state_bytes, budget, may_lower_seqs)
        states = _plan_states(
            config,
            state_bytes,
            budget,
            max_num_seqs,
            kv_bytes_per_token=model_spec.kv_bytes_per_token(dtype),
            max_model_len=max_model_len,
        )
        budget -= states.num_bytes
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    else:
        useful = max_num_seqs * windows.sequence_blocks(max_model_len) + 1
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
    num_bytes = num_blocks * bytes_per_block + (0 if states is None else states.num_bytes)
    if free < num_bytes:  # happens only where the user set the size
        raise InsufficientMemoryError(
            f"a KV cache of "
            f"{gib(num_bytes)} does not fit into the {gib(free)} free on {device.type}"
            f"{_beside(profile)}; lower it",
            param="num_gpu_blocks_override" if sets_blocks else "kv_cache_memory_bytes",
        )
    return KVCachePlan(
        num_blocks, config.block_size, max_model_len, num_bytes, windows, max_num_seqs, states
    )


def _running_states(
    config: ResolvedConfig, state_bytes: int, budget: int, may_lower_seqs: bool
) -> int:
    """Return for how many running sequences half of `budget` has states."""
    fitting = budget // 2 // state_bytes - _OTHER_STATES
    if fitting >= config.max_num_seqs:
        return config.max_num_seqs
    if fitting < 1 or not may_lower_seqs:
        needed = 2 * (config.max_num_seqs + _OTHER_STATES) * state_bytes
        remedies = [f"lower it to at most {fitting}"] if fitting >= 1 else []
        if config.kv_cache_memory_bytes is not None or fitting < 1:
            remedies.append(f"raise kv_cache_memory_bytes to {gib(needed)}")
        raise InsufficientMemoryError(
            f"the state of a sequence takes {gib(state_bytes)}, and those of "
            f"{config.max_num_seqs} sequences more than half of the {gib(budget)} for them and the "
            f"KV cache; {' or '.join(remedies)}",
            param="max_num_seqs",
        )
    return fitting


def _plan_states(
    config: ResolvedConfig,
    state_bytes: int,
    budget: int,
    max_num_seqs: int,
    *,
    kv_bytes_per_token: int,
    max_model_len: int,
) -> StatePlan:
    """Plan the states of running sequences, and checkpoints in a share of the rest of `budget`."""
    interval = blocks_for(_LEAST_INTERVAL, config.block_size) * config.block_size
    every = _PART_IN_PROMPT * state_bytes // kv_bytes_per_token
    num_blocks = max_num_seqs + _OTHER_STATES
    if config.enable_prefix_caching:
        most = max_num_seqs * blocks_for(max_model_len, interval)
        share = int(_CHECKPOINT_SHARE * (budget - num_blocks * state_bytes))
        num_blocks += min(most, share // state_bytes)
    every = blocks_for(max(1, every), interval) * interval
    return StatePlan(num_blocks, num_blocks * state_bytes, interval, every)


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
