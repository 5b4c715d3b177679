"""LoadedModel: what `engine.execution.loading` returns."""

from __future__ import annotations

from dataclasses import dataclass

from engine.execution.devices import ResolvedConfig
from engine.execution.memory.kv_cache_plan import KVCachePlan
from engine.execution.pending_step import Runner


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device.

    Attributes:
        config: the settings, with the defaults for the device.
        runner: runs its steps.
        kv_cache: the size of the KV cache, and how long a sequence may become.
        num_host_blocks: blocks for preempted sequences on the host.
        is_ahead: whether a step is launched before the previous one is read (async scheduling).
        description: model, dtype, device, KV cache size and limits of a step, for the log.
    """

    config: ResolvedConfig
    runner: Runner
    kv_cache: KVCachePlan
    num_host_blocks: int
    is_ahead: bool
    description: str
