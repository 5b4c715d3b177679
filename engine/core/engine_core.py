"""EngineCore: takes requests, steps the model over all of them, hands out their tokens."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable

import torch

from engine.config import EngineConfig
from engine.core.deadlines import Deadlines
from engine.core.kv_cache_manager import KVCacheManager
from engine.core.queue_limits import QueueLimits
from engine.core.request_factory import RequestFactory
from engine.core.scheduler import Scheduler
from engine.core.stats import StatsRecorder
from engine.errors import CheckpointError, ConfigError
from engine.execution.device_queue import DeviceQueue, InlineQueue, WorkerQueue
from engine.execution.model_runner import ModelRunner
from engine.execution.pending_step import PendingStep
from engine.execution.step_graphs import CudaCapturer
from engine.gpu_memory import memory_before_loading, profile_memory
from engine.hub import resolve_checkpoint, resolve_tokenizer
from engine.memory import kv_cache_dtype, plan_kv_cache, swap_space_bytes
from engine.models.config import ModelConfig
from engine.progress import in_tenths
from engine.request import Request
from engine.service.messages import AddRequest, Ready, RequestStats, SequenceOutput, Stats
from engine.text.defaults import GenerationDefaults
from engine.text.detokenizer import Detokenizer
from engine.text.tokenizer import Tokenizer

_WINDOW_PER_TOKEN = 32  # tokens of context that a chunk may carry for each new one
_MAX_WINDOW = 16  # tokens that a window may have before it is worth to look for a shorter one


class EngineCore:
    """The whole engine in one thread: `add_request`, `abort`, and `step` in a loop.

    With `async_scheduling` the loop is one step ahead of the device: it schedules and launches a
    step before it reads the tokens of the one before, so that the device need not wait for it.
    """

    def __init__(
        self, config: EngineConfig, on_progress: Callable[[str], None] = lambda text: None
    ) -> None:
        """Load the model and allocate the KV cache; `on_progress` hears what is being done.

        Raises:
            CheckpointError, ConfigError, InsufficientMemoryError: with what to do about it.
        """
        checkpoint = resolve_checkpoint(config.model)
        model_config = ModelConfig.from_hf(checkpoint)
        device = _device(config)
        dtype = _dtype(config, model_config)
        max_model_len = _max_model_len(config, model_config)

        self.config = config
        self.tokenizer = Tokenizer.from_pretrained(resolve_tokenizer(config.tokenizer, checkpoint))
        self.generation_defaults = GenerationDefaults.from_checkpoint(checkpoint, self.tokenizer)
        for token_id in self.generation_defaults.eos_token_ids:
            if token_id >= model_config.vocab_size:  # config.json's own are checked as it is read
                raise CheckpointError(
                    f"generation_config.json: eos_token_id: {token_id} must be below the model's "
                    f"vocab_size {model_config.vocab_size}"
                )
        self.detokenizer = Detokenizer(self.tokenizer)

        self._is_ahead = _runs_ahead(config, device)
        self._in_flight: PendingStep | None = None  # launched, and not read yet
        before = memory_before_loading(config, device)
        on_progress(f"loading the weights of {config.model}")
        self._runner = ModelRunner(
            checkpoint,
            model_config,
            config,
            max_model_len=max_model_len,
            dtype=dtype,
            device=device,
            queue=_queue(device, is_ahead=self._is_ahead),
            on_progress=in_tenths(on_progress, "loading weights {bar} {share} % of {mib:,.0f} MiB"),
        )
        profile = None
        if before is not None:
            on_progress("measuring the memory of the largest step")
            self._runner.allocate_kv_cache(1)
            profile = profile_memory(config, before, self._runner.run_largest_step, device)
            on_progress(profile.summary)
        cache_dtype = kv_cache_dtype(config, dtype)
        plan = plan_kv_cache(
            config,
            model_config,
            max_model_len=max_model_len,
            dtype=cache_dtype,
            device=device,
            profile=profile,
        )
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < plan.max_model_len:
            raise ConfigError(
                "max_num_batched_tokens: must be at least max_model_len "
                f"({plan.max_model_len}) while enable_chunked_prefill is off"
            )
        host_bytes = swap_space_bytes(config, plan, device)
        on_progress(f"allocating {plan.num_blocks} KV blocks")
        self._runner.allocate_kv_cache(plan.num_blocks)
        num_host_blocks = self._runner.allocate_swap_space(host_bytes)
        if device.type == "cuda" and not config.enforce_eager:
            self._runner.capture_graphs(
                CudaCapturer(),
                in_tenths(on_progress, "capturing CUDA graphs {bar} {done} of {total}"),
            )
        self.scheduler = Scheduler(
            KVCacheManager(
                plan.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                num_host_blocks=num_host_blocks,
            ),
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
        )
        self._deadlines = Deadlines(self.scheduler.unfinished)
        self._queue_limits = QueueLimits.of(config, (plan.num_blocks - 1) * plan.block_size)
        self._recorder = StatsRecorder()
        self._factory = RequestFactory(
            self.tokenizer,
            self.detokenizer,
            eos_token_ids=self.generation_defaults.eos_token_ids,
            vocab_size=model_config.vocab_size,
            max_model_len=plan.max_model_len,
            max_logprobs=config.max_logprobs,
            seeds=random.Random(config.seed),
        )
        self.ready = Ready(
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            description=(
                f"{config.model} ({model_config.architecture}, {dtype}, {device.type}), KV cache "
                f"for {(plan.num_blocks - 1) * plan.block_size:,} tokens "
                f"({plan.num_blocks - 1:,} blocks of {plan.block_size}, "
                f"{plan.num_bytes / 2**20:,.0f} MiB of {cache_dtype}), "
                f"max_model_len {plan.max_model_len:,}"
            ).replace("torch.", ""),
        )

    def add_request(self, message: AddRequest) -> None:
        """Queue a request; its uid must be larger than those before it.

        Raises:
            RequestError: the request is wrong or can never fit; the text names the field.
            QueueFullError: as many requests or prompt tokens are waiting as may wait.
        """
        self._queue_limits.check(
            len(self.scheduler.queued),
            self.scheduler.num_queued_tokens,
            len(message.prompt_token_ids),
        )
        siblings = self._factory.build(message)
        self.scheduler.add(siblings)
        self._recorder.accepted(siblings)
        timeouts = [t for t in (message.timeout_s, self.config.request_timeout_s) if t is not None]
        if timeouts:
            self._deadlines.add(message.uid, message.arrival_time + min(timeouts))

    def abort(self, uid: int) -> list[SequenceOutput]:
        """End a request and free its blocks at once; return its last outputs, of its sequences.

        Unknown uids are ignored.
        """
        aborted = self.scheduler.abort(uid)
        outputs = self._outputs(aborted)  # which may turn "abort" into "stop"
        self._recorder.finished(aborted)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_unfinished_requests() or self._in_flight is not None

    def step(self) -> list[SequenceOutput]:
        """Launch the next step, and read the one that is due; return what may be sent."""
        expired = self._expire()
        if expired:
            return expired  # at once, not after a step of the others
        schedule = self.scheduler.schedule()
        launched = self._runner.launch(schedule) if schedule.rows else None
        due = launched
        if self._is_ahead:
            due, self._in_flight = self._in_flight, launched
        return [] if due is None else self._read(due)

    def _read(self, step: PendingStep) -> list[SequenceOutput]:
        """Wait for the tokens of a step, and hand them out."""
        advanced = self.scheduler.update(step.schedule, step.wait())
        outputs = self._outputs(advanced)  # which may still turn "length" into "stop"
        self._recorder.stepped(sum(row.num_tokens for row in step.schedule.rows), advanced)
        self._recorder.finished(advanced)
        return outputs

    def take_stats(self) -> Stats:
        """Return what happened since the last call, and how things stand."""
        return self._recorder.take(self.scheduler)

    def check_integrity(self) -> None:
        """Assert that no block is lost and no reference is left over."""
        self.scheduler.check_integrity()

    def _expire(self) -> list[SequenceOutput]:
        """Abort what has passed its deadline."""
        return [
            output
            for uid in self._deadlines.expired(time.monotonic())
            for output in self.abort(uid)
        ]

    def _outputs(self, requests: Iterable[Request]) -> list[SequenceOutput]:
        return [
            self._release(request, end)
            for request in requests
            if (end := request.num_releasable_tokens) - request.num_released_tokens
            >= self._interval(request)
            or request.finish_reason is not None
        ]

    def _interval(self, request: Request) -> int:
        """Return how many tokens a chunk must have."""
        if request.num_released_tokens == 0:
            return 1  # the first token is never kept waiting
        # A window becomes long only while there is no text to send, and each chunk carries it.
        return max(self.config.stream_interval, len(request.window_ids) // _WINDOW_PER_TOKEN)

    def _release(self, request: Request, end: int) -> SequenceOutput:
        start, request.num_released_tokens = request.num_released_tokens, end
        begin = request.num_prompt_tokens + start
        new_ids = request.token_ids[begin : request.num_prompt_tokens + end]
        window_ids = request.window_ids
        request.window_ids = self._next_window(request, new_ids)
        finished = request.finish_reason is not None
        text_cut = self._text_cut(request, window_ids, new_ids) if finished else 0
        with_logprobs = request.sampling_params.logprobs is not None
        logprobs = request.logprobs
        if with_logprobs:
            logprobs, request.logprobs = logprobs[: end - start], logprobs[end - start :]
        return SequenceOutput(
            uid=request.uid,
            index=request.index,
            token_ids=new_ids,
            window_ids=window_ids,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            text_cut=text_cut,
            logprobs=logprobs if with_logprobs else None,
            cumulative_logprob=request.cumulative_logprob if with_logprobs else None,
            stats=_stats(request) if finished else None,
        )

    def _next_window(self, request: Request, new_ids: list[int]) -> list[int]:
        """Return what stands for all tokens up to `new_ids`: any window does, if it is not long."""
        window_ids = request.window_ids
        if len(window_ids) + len(new_ids) <= _MAX_WINDOW:
            return window_ids + new_ids
        return self.detokenizer.next_window(
            window_ids, new_ids, skip_special_tokens=request.sampling_params.skip_special_tokens
        )

    def _text_cut(self, request: Request, window_ids: list[int], new_ids: list[int]) -> int:
        """Return the characters at the end of the final text that belong to what stopped it."""
        params = request.sampling_params
        text_cut = request.end_text()
        if not isinstance(request.stop_reason, int) or params.include_stop_str_in_output:
            return text_cut
        if params.skip_special_tokens and request.stop_reason in self.tokenizer.special_ids:
            return 0
        with_stop, without_stop = (
            self.detokenizer.delta(
                window_ids, ids, final=True, skip_special_tokens=params.skip_special_tokens
            )
            for ids in (new_ids, new_ids[:-1])
        )
        return len(with_stop) - len(without_stop)


def _stats(request: Request) -> RequestStats:
    now = time.monotonic()
    return RequestStats(
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_output_tokens=request.num_output_tokens,
        num_preemptions=request.num_preemptions,
        arrival_time=request.arrival_time,
        first_scheduled_time=request.first_scheduled_time or now,
        first_token_time=request.first_token_time or now,
        finished_time=now,
    )


def _device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _runs_ahead(config: EngineConfig, device: torch.device) -> bool:
    # On a CPU the host's work and the model's share the cores: there is nothing to hide it behind.
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def _queue(device: torch.device, *, is_ahead: bool) -> DeviceQueue:
    return WorkerQueue() if is_ahead and device.type == "cpu" else InlineQueue()


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
