"""EngineCore: adds requests, runs steps of the model over all of them, returns their outputs."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain

from engine.checkpoint.hub import resolve_checkpoint
from engine.config.engine_config import EngineConfig
from engine.core.constraints.grammar_queue import GrammarQueue
from engine.core.constraints.processors import load_processors
from engine.core.kv.kv_cache_manager import KVCacheManager
from engine.core.kv.state_manager import StateManager
from engine.core.output_builder import OutputBuilder
from engine.core.queue.queue_limits import QueueLimits
from engine.core.request import Request
from engine.core.request_factory import RequestFactory
from engine.core.schedule import SchedulerOutput
from engine.core.scheduler import Scheduler, check_idle, check_integrity
from engine.core.spec_decode.proposer import NgramProposer
from engine.core.stats import StatsRecorder
from engine.core.update_from_output import UpdateResult
from engine.errors import RequestError, StepOutOfMemoryError, TridentError
from engine.execution.loading import load_model
from engine.execution.memory.kv_cache_plan import StatePlan
from engine.execution.pending_step import PendingStep, Ranks
from engine.logits_processors import ProcessorContext
from engine.models.pooling import task_of
from engine.models.registry import read_model_spec
from engine.nvtx import nvtx_range
from engine.protocol.messages import (
    FOR_EMBEDDINGS,
    AddRequest,
    Ready,
    RequestFailed,
    SequenceOutput,
    Stats,
)
from engine.protocol.step_outputs import NO_OUTPUTS, StepOutputs
from engine.request.generation_defaults import GenerationDefaults
from engine.text.chat_template import template_facts
from engine.text.detokenizer import Detokenizer
from engine.text.grammar.compiler import GrammarCompiler
from engine.text.grammar.vocabulary import Vocabulary
from engine.text.load_tokenizer import load_tokenizer
from engine.text.output_parsing.parser_spec import ParserSpec, tool_call_parser

log = logging.getLogger("trident.engine")

_MAX_IDLE_S = 0.005  # that arrivals may wait while nothing but grammars is to be waited for

_SLACK = 64  # entries of finished requests that may stay in the heap


def _state_manager(plan: StatePlan | None) -> StateManager | None:
    if plan is None:
        return None
    return StateManager(plan.num_blocks, interval=plan.interval, every=plan.every)


class Deadlines:
    """A heap by time. Entries of finished requests are dropped when they expire, or when they
    outnumber those of unfinished ones.
    """

    def __init__(self, unfinished: Collection[int]) -> None:
        """`unfinished` is a live view of the uids of unfinished requests."""
        self._unfinished = unfinished
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, uid: int, deadline: float) -> None:
        """Let `uid` expire at `deadline`, in seconds of `time.monotonic()`."""
        if len(self._heap) > 2 * len(self._unfinished) + _SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._unfinished]
            heapify(self._heap)
        heappush(self._heap, (deadline, uid))

    def expired(self, now: float) -> list[int]:
        """Remove and return the unfinished requests whose deadline is not after `now`."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, uid = heappop(self._heap)
            if uid in self._unfinished:
                late.append(uid)
        return late


class EngineCore:
    """The whole engine in one thread: `add_request`, `abort`, and `step` in a loop.

    With `async_scheduling` the loop is one step ahead of the device: it schedules and launches a
    step before it reads the tokens of the one before, so that the device need not wait for it.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] = lambda text: None,
        ranks: Ranks | None = None,
    ) -> None:
        """Load the model and allocate the KV cache; `on_progress` is called with sentences.

        With `ranks` this is the first one of them, and loads its part.

        Raises:
            CheckpointError, ConfigError, InsufficientMemoryError: with what to do about it.
        """
        checkpoint = resolve_checkpoint(config.model, weights=config.reads_weights)
        model_spec = read_model_spec(checkpoint, config.hf_overrides)
        task = task_of(checkpoint, model_spec.architecture)
        self.tokenizer = load_tokenizer(config, checkpoint)
        self.generation_defaults = GenerationDefaults.from_checkpoint(
            checkpoint, self.tokenizer, model_spec.vocab_size, config
        )
        self.detokenizer = Detokenizer(self.tokenizer)
        self.parser_spec = ParserSpec(
            self.tokenizer, config.reasoning_parser, config.tool_call_parser
        )
        processors = load_processors(ProcessorContext(self.tokenizer, model_spec.vocab_size))
        self._ranks = ranks
        group = None if ranks is None else ranks.group
        loaded = load_model(
            config, checkpoint, model_spec, self._text_token_ids, on_progress, group
        )
        plan, self.config = loaded.kv_cache, loaded.config
        self._runner = loaded.runner if ranks is None else ranks.lead(loaded.runner)
        self._is_ahead = loaded.is_ahead
        self._in_flight: tuple[PendingStep, int] | None = None  # launched, and not read yet
        token_flags = self.detokenizer.token_flags(model_spec.vocab_size)
        self.scheduler = Scheduler(
            KVCacheManager(
                plan.num_blocks,
                config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
                num_host_blocks=loaded.num_host_blocks,
                windows=plan.windows,
                states=_state_manager(plan.states),
            ),
            max_num_seqs=loaded.config.max_num_seqs,
            max_num_batched_tokens=loaded.config.max_num_batched_tokens,
            enable_chunked_prefill=config.enable_chunked_prefill,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            policy=config.scheduling_policy,
            max_model_len=plan.max_model_len,
            token_bytes=token_flags.byte_sets,
            proposer=NgramProposer.of(config.speculative_config),
        )
        eos_token_ids = self.generation_defaults.eos_token_ids
        self._grammars = GrammarQueue(
            self.scheduler,
            GrammarCompiler(Vocabulary.of(self.tokenizer, model_spec.vocab_size, eos_token_ids)),
            max(model_spec.vocab_size, self.tokenizer.vocab_size),
        )
        self._outputs = OutputBuilder(
            self.detokenizer,
            token_flags.opens_window,
            self.scheduler.slots,
            stream_interval=config.stream_interval,
        )
        self._deadlines = Deadlines(self.scheduler.unfinished)
        self._queue_limits = QueueLimits.of(
            config,
            kv_cache_tokens=plan.num_tokens,
            max_num_seqs=loaded.config.max_num_seqs,
        )
        self._recorder = StatsRecorder()
        draw_seed = partial(random.Random(config.seed).getrandbits, 64)
        self._factory = RequestFactory(
            self.tokenizer,
            self.detokenizer,
            self.parser_spec,
            eos_token_ids=eos_token_ids,
            vocab_size=model_spec.vocab_size,
            max_model_len=plan.max_model_len,
            max_logprobs=config.max_logprobs,
            min_priority=config.min_priority,
            draw_seed=(lambda: config.seed) if config.deterministic else draw_seed,
            processors=processors,
            task=task,
        )
        self.ready = Ready(
            max_model_len=plan.max_model_len,
            vocab_size=model_spec.vocab_size,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            kv_cache_tokens=plan.num_tokens,
            max_num_seqs=loaded.config.max_num_seqs,
            description=loaded.description + ("" if task.generates else FOR_EMBEDDINGS),
            computes_on_cpu=self.config.device == "cpu",
            tool_call_parser=tool_call_parser(self.tokenizer, config.tool_call_parser),
            has_reasoning=self.parser_spec.has_reasoning,
            **template_facts(self.tokenizer),
            do_sample=self.generation_defaults.do_sample,
            sampling_defaults=dict(self.generation_defaults.sampling),
            ranks=[] if ranks is None else [loaded.device],
        )

    def _text_token_ids(self) -> list[int]:
        """Return the tokens that have a text and end no sequence."""
        ends = self.generation_defaults.eos_token_ids
        return [i for i in self.tokenizer.text_token_ids() if i not in ends]

    def add_request(self, message: AddRequest) -> list[RequestFailed]:
        """Queue a request; its uid must be larger than those of its tenant before it.

        Returns the refusals of requests of lower priority that it displaces from a full queue.

        Raises:
            RequestError: the request is wrong or can never fit; the text names the field.
            QueueFullError: the limit of waiting sequences, prompt tokens or grammars is reached.
        """
        siblings = self._factory.build(message)
        displaced = self.scheduler.waiting.displaced_by(
            siblings[0], self._queue_limits, len(self.scheduler.slots.free)
        )
        spec = siblings[0].sampling_params.structured_outputs
        timeouts = [t for t in (message.timeout_s, self.config.request_timeout_s) if t is not None]
        if spec is None:
            self.scheduler.add(siblings)
        else:
            self._grammars.add(siblings, spec)
        try:
            self._recorder.accepted(siblings)
            if timeouts:
                self._deadlines.add(message.uid, message.arrival_time + min(timeouts))
        except Exception:
            self._abort(message.uid)  # it is refused: remove all its sequences
            raise
        return [self._refuse(request.uid) for request in displaced]

    def _refuse(self, uid: int) -> RequestFailed:
        """End a waiting request that another one displaces from the full queue."""
        self._end(uid)
        error = self._queue_limits.displaced()
        return RequestFailed(uid, error.report())

    def abort(self, uid: int) -> StepOutputs:
        """End a request, if it is known, and free its blocks at once; return its last outputs."""
        return self._hand_out(self._abort(uid))

    def _abort(self, uid: int) -> list[Request]:
        self._grammars.discard(uid)
        return self.scheduler.abort(uid)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.scheduler.unfinished) or self._in_flight is not None

    @nvtx_range("step")
    def step(self) -> StepOutputs:
        """Launch the next step, and read the oldest one in flight; return the outputs to send.

        A request whose data makes its decoding or its outputs fail ends alone, with a
        `RequestFailed` as the last output for its uid. So do the requests of a step for which the
        device has no memory.
        """
        ended = [*self._expire(), *self._start_compiled()]
        if ended:
            return StepOutputs.concatenated(ended)  # without waiting for a step
        schedule = self.scheduler.schedule()
        launched, failures = None, NO_OUTPUTS
        if schedule.num_rows:
            try:
                launched = self._launch(schedule)
            except StepOutOfMemoryError as error:
                uids = sorted(self.scheduler.cancel(schedule))
                failures = StepOutputs.of(self._fail(uids, error))
        due = launched
        if self._is_ahead:
            due, self._in_flight = self._in_flight, launched
        if due is None:
            if launched or not self.scheduler.is_late:
                if not launched:
                    self._grammars.wait(_MAX_IDLE_S)
                return failures
            result, num_tokens = self.scheduler.update(None), 0
        else:
            pending, num_tokens = due
            result = self.scheduler.update(pending.wait())
        self._recorder.stepped(num_tokens, result)
        return StepOutputs.concatenated([failures, self._outputs_of(result)])

    def _launch(self, schedule: SchedulerOutput) -> tuple[PendingStep, int]:
        """Launch a step; the host prepares the sampling while the forward pass runs."""
        self._runner.forward(schedule)
        pending = self._runner.sample(self.scheduler.constraints.batch(schedule))
        return pending, schedule.total_num_tokens

    @nvtx_range("outputs")
    def _outputs_of(self, result: UpdateResult) -> StepOutputs:
        rows, others = self._outputs.build_rows(result.slots)
        return StepOutputs.concatenated([rows, self._hand_out(others + result.examined)])

    def _hand_out(self, requests: Iterable[Request]) -> StepOutputs:
        """Return the outputs of `requests`, and count those that have ended.

        A request that has failed, or whose outputs cannot be built, is aborted with its siblings.
        """
        outputs: list[SequenceOutput | RequestFailed] = []
        errors: dict[int, Exception] = {}  # by uid, the first one
        for request in chain.from_iterable(each.results() for each in requests):
            self._recorder.finished(request)
            try:
                output = self._outputs.build(request)
            except Exception as raised:
                errors.setdefault(request.uid, raised)
            else:
                if output is not None:
                    outputs.append(output)
        for uid, error in errors.items():
            outputs += self._fail([uid], error)
        return StepOutputs.of(outputs) if outputs else NO_OUTPUTS

    def _fail(self, uids: Sequence[int], error: Exception) -> list[RequestFailed]:
        """End requests because of `error`; users get the text of a `RequestError` alone."""
        if not isinstance(error, RequestError):
            log.error("request failed", exc_info=error, extra={"fields": {"uids": uids}})
        for uid in uids:
            self._end(uid)
        shown = error if isinstance(error, TridentError) else TridentError("internal error")
        return [RequestFailed(uid, shown.report()) for uid in uids]

    def _end(self, uid: int) -> None:
        """End all sequences of a request, and count them."""
        for sibling in self._abort(uid):
            self._recorder.finished(sibling)

    def take_stats(self) -> Stats:
        """Return the counters since the last call, and the gauges now."""
        waits = () if self._ranks is None else self._ranks.take_waits()
        return self._recorder.take(self.scheduler, self._runner.expert_counts(), waits)

    def check_idle(self) -> None:
        """Assert, by counters alone, that no block is lost while there is no request."""
        check_idle(self.scheduler)

    def check_integrity(self) -> None:
        """Assert that no block is lost and no reference is left over, by a scan of all blocks."""
        check_integrity(self.scheduler)

    def _expire(self) -> list[StepOutputs]:
        """Abort the requests whose deadline has passed."""
        return [self.abort(uid) for uid in self._deadlines.expired(time.monotonic())]

    def _start_compiled(self) -> list[StepOutputs]:
        """Queue the requests whose grammar is compiled; fail those whose grammar cannot be."""
        return [StepOutputs.of(self._fail([uid], error)) for uid, error in self._grammars.release()]
