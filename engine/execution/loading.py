"""Loads a checkpoint to a model that is ready to run, with all memory that it will need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.core.schedule import SamplingBatch, Schedule
from engine.errors import ConfigError
from engine.execution.cpu_threads import set_num_threads
from engine.execution.device_queue import InlineQueue, WorkerQueue
from engine.execution.devices import (
    ResolvedConfig,
    choose_device,
    require_full_precision,
    resolve,
)
from engine.execution.graphs.step_graphs import CudaCapturer
from engine.execution.memory.gpu_memory_profile import (
    cache_fills_share,
    memory_before_loading,
    profile_memory,
)
from engine.execution.memory.kv_cache_plan import (
    KVCachePlan,
    kv_cache_dtype,
    plan_kv_cache,
    swap_space_bytes,
)
from engine.execution.model_runner import ModelRunner
from engine.execution.null_device import NullRunner
from engine.execution.pending_step import PendingStep
from engine.execution.progress import in_tenths
from engine.models.model_config import ModelConfig

log = logging.getLogger("trident.engine")

_TYPICAL_ROWS = 16  # of the step that is timed to choose the number of CPU threads


class Runner(Protocol):
    """Runs the scheduled steps, in order: for each a call of `forward`, then one of `sample`."""

    def forward(self, schedule: Schedule) -> None:
        """Launch the forward pass of a step with at least one row, without waiting for it."""

    def sample(self, sampling: SamplingBatch) -> PendingStep:
        """Launch the sampling of the step whose forward pass was launched last."""


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


def load_model(
    settings: EngineConfig,
    checkpoint: Path,
    model_config: ModelConfig,
    on_progress: Callable[[str], None],
) -> LoadedModel:
    """Load the weights, allocate the KV cache, and capture CUDA graphs where there is a GPU.

    Raises:
        CheckpointError, ConfigError, InsufficientMemoryError, UnsupportedError: with what to do
            about it.
    """
    device, dtype = choose_device(settings), _dtype(settings, model_config)
    config = resolve(settings, device)
    cache_dtype = kv_cache_dtype(config, dtype)
    max_model_len = _max_model_len(config, model_config)
    # On a CPU the host's work and the model's share the cores: overlap gains nothing.
    is_ahead = device.type == "cuda" if config.async_scheduling is None else config.async_scheduling
    if device.type == "cuda":
        require_full_precision()
    before = memory_before_loading(config, device)
    on_progress(f"loading the weights of {config.model}")
    runner = ModelRunner(
        checkpoint,
        model_config,
        config,
        max_model_len=max_model_len,
        dtype=dtype,
        device=device,
        queue=WorkerQueue() if is_ahead and device.type == "cpu" else InlineQueue(),
        on_progress=in_tenths(on_progress, "loading weights {bar} {share} % of {mib:,.0f} MiB"),
    )

    def capture(what: str) -> None:
        if device.type == "cuda" and not config.enforce_eager:
            text = what + " CUDA graphs {bar} {done} of {total}"
            begin = time.perf_counter()
            summary = runner.capture_graphs(CudaCapturer(), in_tenths(on_progress, text))
            on_progress(f"{summary} ({what} them took {time.perf_counter() - begin:.1f} s)")

    profile = None
    if before is not None:
        on_progress("compiling kernels, and measuring the memory of the largest step")
        runner.allocate_kv_cache(1)
        # A cache of a given size leaves it to the user what graphs find beside it.
        measure_graphs = partial(capture, "measuring") if cache_fills_share(config) else None
        profile = profile_memory(config, before, runner.warm_up, measure_graphs, device)
        runner.drop_graphs()
        on_progress(profile.summary)
    plan = plan_kv_cache(
        config,
        model_config,
        max_model_len=max_model_len,
        dtype=cache_dtype,
        device=device,
        profile=profile,
    )
    _check_prefill(config, plan)
    host_bytes = swap_space_bytes(config, plan, device)
    on_progress(f"allocating {plan.num_blocks} KV blocks")
    runner.allocate_kv_cache(plan.num_blocks)
    num_host_blocks = runner.allocate_swap_space(host_bytes)
    where = device.type
    if device.type == "cpu":
        num_rows = min(config.max_num_seqs, _TYPICAL_ROWS)
        num_threads = set_num_threads(lambda: runner.run_decode_step(num_rows))
        where = f"cpu with {num_threads} thread{'s' * (num_threads > 1)}"
    capture("capturing")
    description = _description(
        config,
        model_config,
        f"{dtype}, {where}",
        plan,
        f"{plan.num_bytes / 2**20:,.0f} MiB of {cache_dtype}",
    )
    return LoadedModel(config, runner, plan, num_host_blocks, is_ahead, description)


def load_null_device(
    settings: EngineConfig, model_config: ModelConfig, token_ids: Sequence[int], step_s: float
) -> LoadedModel:
    """Prepare the null device to make up tokens of `token_ids`, in `step_s` seconds per step.

    The KV cache has blocks for `max_num_seqs` sequences of full length, but no memory.

    Raises:
        ConfigError, InsufficientMemoryError: with what to do about it.
    """
    usable = [token_id for token_id in token_ids if token_id < model_config.vocab_size]
    if not usable:
        raise ConfigError("device: null needs a vocabulary with tokens of text")
    meta = torch.device("meta")
    config = resolve(settings, meta)
    cache_dtype = kv_cache_dtype(config, _dtype(config, model_config))
    plan = plan_kv_cache(
        config,
        model_config,
        max_model_len=_max_model_len(config, model_config),
        dtype=cache_dtype,
        device=meta,
    )
    _check_prefill(config, plan)
    num_host_blocks = swap_space_bytes(config, plan, meta) * plan.num_blocks // plan.num_bytes
    runner = NullRunner(
        config, model_config, usable, max_model_len=plan.max_model_len, step_s=step_s
    )
    warning = f"NO MODEL IS COMPUTED: null device, {1000 * step_s:g} ms per step, made-up tokens"
    log.warning("%s; for benchmarks only", warning)
    is_ahead = config.async_scheduling is not False
    description = f"{warning}; {_description(config, model_config, 'null', plan, 'no memory')}"
    return LoadedModel(config, runner, plan, num_host_blocks, is_ahead, description)


def _description(
    config: ResolvedConfig,
    model_config: ModelConfig,
    where: str,
    plan: KVCachePlan,
    memory: str,
) -> str:
    num_usable = plan.num_blocks - 1  # without the null block
    return (
        f"{config.model} ({model_config.architecture}, {where}), KV cache for "
        f"{num_usable * plan.block_size:,} tokens ({num_usable:,} blocks of {plan.block_size}, "
        f"{memory}), max_model_len {plan.max_model_len:,}, max_num_seqs "
        f"{config.max_num_seqs:,}, max_num_batched_tokens {config.max_num_batched_tokens:,}"
    ).replace("torch.", "")


def _check_prefill(config: ResolvedConfig, plan: KVCachePlan) -> None:
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < plan.max_model_len:
        raise ConfigError(
            "max_num_batched_tokens: must be at least max_model_len "
            f"({plan.max_model_len}) while enable_chunked_prefill is off"
        )


def _dtype(config: EngineConfig, model_config: ModelConfig) -> torch.dtype:
    name = model_config.dtype if config.dtype == "auto" else config.dtype
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.context_length
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(
            f"max_model_len: {config.max_model_len} exceeds the {limit} positions that the model "
            "was made for"
        )
    return config.max_model_len or limit
