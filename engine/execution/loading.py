"""Loads a checkpoint to a model that is ready to run, with all memory that it will need."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, UnsupportedError
from engine.execution.attention.backend import attention_backend
from engine.execution.cpu_choices import most_threads, set_num_threads
from engine.execution.devices import (
    ResolvedConfig,
    choose_device,
    require_full_precision,
    resolve,
)
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.graphs.step_graphs import CudaCapturer
from engine.execution.memory.gpu_memory_profile import (
    MemoryProfile,
    cache_fills_share,
    gib,
    memory_before_loading,
    profile_memory,
    take_snapshot,
)
from engine.execution.memory.kv_cache_plan import (
    KVCachePlan,
    kv_cache_dtype,
    plan_kv_cache,
    swap_space_bytes,
)
from engine.execution.model_runner import ModelRunner
from engine.execution.model_weights import load_weights
from engine.execution.null_device import NullRunner
from engine.execution.pending_step import Runner
from engine.execution.progress import in_tenths
from engine.layers.rank_group import RankGroup
from engine.models.kv_groups import group_layers
from engine.models.sharding import shard
from engine.models.spec import ModelSpec

log = logging.getLogger("trident.engine")

_TYPICAL_ROWS = 16  # of the step that is timed to choose the number of CPU threads


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device.

    Attributes:
        config: the settings, with the defaults for the device.
        runner: runs its steps.
        kv_cache: the size of the KV cache, and how long a sequence may become.
        num_host_blocks: blocks for preempted sequences on the host.
        is_ahead: whether a step is launched before the previous one is read (async scheduling).
        device: of its steps, and how much of it.
        description: model, dtype, device, KV cache size and limits of a step, for the log.
    """

    config: ResolvedConfig
    runner: Runner
    kv_cache: KVCachePlan
    num_host_blocks: int
    is_ahead: bool
    device: str
    description: str


def load_model(
    settings: EngineConfig,
    checkpoint: Path,
    model_spec: ModelSpec,
    text_token_ids: Callable[[], Sequence[int]],
    on_progress: Callable[[str], None],
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load the weights, allocate the KV cache, and capture CUDA graphs where there is a GPU.

    With `group`, this process is one of its ranks, all of which load their part at the same time.

    The null device has none of these: it is given the tokens that it makes up, `text_token_ids`,
    which are not asked for otherwise.

    Raises:
        CheckpointError, ConfigError, InsufficientMemoryError, UnsupportedError: with what to do
            about it.
    """
    loader = _Loader(settings, model_spec, on_progress, group)
    if loader.device.type == "meta":
        return loader.load_null_device(text_token_ids())
    return loader.load(checkpoint)


class _Loader:
    """Loads one model on the device that the settings choose."""

    def __init__(
        self,
        settings: EngineConfig,
        model_spec: ModelSpec,
        on_progress: Callable[[str], None],
        group: RankGroup | None,
    ) -> None:
        self.device = choose_device(settings, 0 if group is None else group.rank)
        self._config = config = resolve(settings, self.device)
        self._may_lower_seqs = settings.max_num_seqs is None
        if model_spec.state_shapes:
            self._require_states(model_spec, settings)
        self._group = group
        self._whole_spec = model_spec
        if group is not None:
            if self.device.type == "meta":
                raise UnsupportedError(
                    "must be 1 with the null device; leave it out", param="tensor_parallel_size"
                )
            if self.device.type == "cuda":  # of this thread, which runs the steps of all but rank 0
                torch.cuda.set_device(self.device)
            whole_experts = settings.enable_expert_parallel
            model_spec = shard(model_spec, group.rank, group.size, expert_parallel=whole_experts)
        self._model_spec = model_spec
        self._on_progress = on_progress
        self._dtype: torch.dtype = getattr(
            torch, model_spec.dtype if config.dtype == "auto" else config.dtype
        )
        self._max_model_len = config.max_model_len or model_spec.context_length
        self._groups = group_layers(model_spec.sliding_windows, self._max_model_len)
        if self._max_model_len > model_spec.context_length:
            raise ConfigError(
                f"must be at most {model_spec.context_length}, the model's context length (got "
                f"{config.max_model_len})",
                param="max_model_len",
            )
        # A CPU has no queue of its own: a step has run when it is launched.
        is_ahead = config.async_scheduling
        self._is_ahead = self.device.type != "cpu" if is_ahead is None else is_ahead

    def _require_states(self, model_spec: ModelSpec, settings: EngineConfig) -> None:
        """Raise `UnsupportedError` if layers that keep states are not served with `settings`."""
        if self.device.type == "cuda":
            raise UnsupportedError(
                f"{model_spec.architecture} runs on CPUs only in this version; set it to cpu",
                param="device",
            )
        if settings.speculative_config is not None:
            raise UnsupportedError(
                f"is not supported for {model_spec.architecture}; leave it out",
                param="speculative_config",
            )

    def load(self, checkpoint: Path) -> LoadedModel:
        """Load the weights of `checkpoint` on a CPU or a GPU."""
        config, device, report = self._config, self.device, self._on_progress
        if device.type == "cuda":
            require_full_precision()
        before = memory_before_loading(config, device)
        attention = attention_backend(
            device,
            dtype=self._dtype,
            block_size=config.block_size,
            deterministic=config.deterministic,
        )
        attention.check(
            num_heads=self._model_spec.num_heads,
            num_kv_heads=self._model_spec.num_kv_heads,
            head_dim=self._model_spec.head_dim,
            kv_cache_dtype=kv_cache_dtype(config, self._dtype),
        )
        report(f"loading the weights of {config.model}")
        runner = ModelRunner(
            load_weights(
                config,
                self._whole_spec,
                checkpoint,
                max_model_len=self._max_model_len,
                dtype=self._dtype,
                device=device,
                on_progress=report,
                group=self._group,
            ),
            attention,
            config,
            groups=self._groups,
            max_model_len=self._max_model_len,
            dtype=self._dtype,
            device=device,
            rank_group=self._group,
        )
        captures = device.type == "cuda" and not config.enforce_eager
        profile = None
        if before is not None:
            report("compiling kernels, and measuring the memory of the largest step")
            runner.allocate_kv_cache(1)
            # A cache of a given size leaves it to the user what graphs find beside it.
            measures_graphs = captures and cache_fills_share(config)
            measure = partial(self._capture_some, runner) if measures_graphs else None

            def run_profile() -> None:
                if measure is not None:
                    measure()  # what libraries load for these sizes is not taken for the graphs'
                    runner.drop_graphs()
                    torch.cuda.reset_peak_memory_stats(device)
                runner.warm_up()

            profile = profile_memory(config, before, run_profile, measure, device)
            runner.drop_graphs()
            report(profile.summary)
        plan = self._plan(profile)
        host_bytes = swap_space_bytes(config, plan, device)
        report(f"allocating {plan.num_blocks} KV blocks")
        runner.allocate_kv_cache(
            plan.num_blocks, 0 if plan.states is None else plan.states.num_blocks
        )
        num_host_blocks = runner.allocate_swap_space(host_bytes // self._model_spec.num_ranks)
        if self._group is not None:
            num_host_blocks = self._group.least(num_host_blocks)
        where = device.type if self._group is None else str(device)
        if device.type == "cpu":
            num_threads = self._set_num_threads(runner)
            where = f"cpu with {num_threads} thread{'s' * (num_threads > 1)}"
        if captures:
            self._capture(runner, runner.graph_sizes)
        if before is not None:
            # The largest step is the first: smaller ones take parts of what it has allocated. After
            # them it would find no place among theirs, and the process would outgrow its share.
            runner.warm_up()
        memory = f"{plan.kv_bytes / 2**20:,.0f} MiB of {kv_cache_dtype(config, self._dtype)}"
        return self._loaded(runner, plan, num_host_blocks, where, memory)

    def _set_num_threads(self, runner: ModelRunner) -> int:
        """Set how many threads compute on a CPU; ranks have equal shares of its cores."""
        if self._group is not None:
            num_threads = max(1, most_threads() // self._group.size)
            torch.set_num_threads(num_threads)
            return num_threads
        num_rows = min(self._config.max_num_seqs, _TYPICAL_ROWS)
        subject = (self._model_spec, self._dtype, self._config, num_rows)
        return set_num_threads(subject, lambda: runner.run_decode_step(num_rows))

    def load_null_device(self, token_ids: Sequence[int]) -> LoadedModel:
        """Prepare the null device to make up tokens of `token_ids`.

        The KV cache has blocks for `max_num_seqs` sequences of full length, but no memory.
        """
        step_s = self._config.null_step_s
        assert step_s is not None
        plan = self._plan()
        config = self._config
        swap_bytes = swap_space_bytes(config, plan, self.device)
        runner = NullRunner(
            config,
            self._model_spec,
            token_ids,
            num_groups=len(self._groups.windows),
            max_model_len=plan.max_model_len,
            step_s=step_s,
        )
        warning = (
            f"NO MODEL IS COMPUTED: null device, {1000 * step_s:g} ms per step, made-up tokens"
        )
        log.warning("%s; for benchmarks only", warning)
        num_host_blocks = swap_bytes * plan.num_blocks // plan.num_bytes
        loaded = self._loaded(runner, plan, num_host_blocks, "null", "no memory")
        return replace(loaded, description=f"{warning}; {loaded.description}")

    def _plan(self, profile: MemoryProfile | None = None) -> KVCachePlan:
        plan = plan_kv_cache(
            self._config,
            self._model_spec,
            max_model_len=self._max_model_len,
            dtype=kv_cache_dtype(self._config, self._dtype),
            model_dtype=self._dtype,
            device=self.device,
            profile=profile,
            group=self._group,
            may_lower_seqs=self._may_lower_seqs,
        )
        if plan.max_num_seqs < self._config.max_num_seqs:
            log.info("max_num_seqs is lowered to %d, whose states fit", plan.max_num_seqs)
            self._config = self._config.model_copy(update={"max_num_seqs": plan.max_num_seqs})
        most = self._config.max_num_batched_tokens
        if not self._config.enable_chunked_prefill and most < plan.max_model_len:
            raise ConfigError(
                f"must be at least max_model_len ({plan.max_model_len}) while "
                "enable_chunked_prefill is false",
                param="max_num_batched_tokens",
            )
        return plan

    def _capture(self, runner: ModelRunner, sizes: GraphSizes) -> None:
        begin, free = time.perf_counter(), take_snapshot(self.device).free
        text = "capturing CUDA graphs: {done} of {total}"
        num_graphs = runner.capture_graphs(
            CudaCapturer(), in_tenths(self._on_progress, text), sizes
        )
        taken = gib(free - take_snapshot(self.device).free)
        self._on_progress(
            f"{num_graphs} CUDA graphs, for steps of up to {sizes.decode[-1]:,} sequences, and of "
            f"up to {sizes.mixed[-1]:,} tokens with prompts among them, took "
            f"{time.perf_counter() - begin:.1f} s and {taken}"
        )

    def _capture_some(self, runner: ModelRunner) -> float:
        """Capture some graphs; return how many times as many there will be."""
        some = runner.graph_sizes.some()
        self._capture(runner, some)
        return runner.graph_sizes.num_steps / some.num_steps

    def _loaded(
        self, runner: Runner, plan: KVCachePlan, num_host_blocks: int, device: str, memory: str
    ) -> LoadedModel:
        config, num_usable = self._config, plan.num_blocks - 1  # without the null block
        where = device
        if self.device.type != "meta":
            rank = self._group and f"rank {self._group.rank} of {self._group.size}, "
            where = f"{self._dtype}, {rank or ''}{device}"
        description = (
            f"{config.model} ({self._model_spec.architecture}, {where}), KV cache for "
            f"{plan.num_tokens:,} tokens ({num_usable:,} blocks of {plan.block_size}, {memory}), "
            f"max_model_len {plan.max_model_len:,}, max_num_seqs "
            f"{config.max_num_seqs:,}, max_num_batched_tokens {config.max_num_batched_tokens:,}"
        ).replace("torch.", "")
        if plan.states is not None:
            num_states = plan.states.num_blocks - 1  # likewise
            size = f"{plan.states.num_bytes / 2**20:,.0f} MiB"
            description += f", {num_states:,} states of sequences ({size})"
        if (drafts := config.speculative_config) is not None:
            description += f", up to {drafts.num_speculative_tokens} guessed tokens"
        return LoadedModel(
            config, runner, plan, num_host_blocks, self._is_ahead, device, description
        )
