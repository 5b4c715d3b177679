"""Request: the engine's mutable state of one sequence while it is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.constraints.bad_words import BadWords
from engine.core.constraints.processors import AskedProcessor
from engine.core.constraints.thinking_budget import ThinkingBudget
from engine.core.counter import NUM_COUNTERS, Counter
from engine.core.logprobs.prompt_scores import PromptScores
from engine.core.request_state import RequestKV, RequestOutput, RequestTimes
from engine.core.schedule import MAX_STOP_TOKEN_IDS
from engine.request.sampling_params import SamplingParams
from engine.text.grammar.matcher import SequenceGrammar
from engine.text.output_parsing.tracker import OutputTracker
from engine.text.stop.checker import StopChecker

FinishReason = Literal["stop", "length", "abort", "error"]

MAX_BYPASSED = 64  # later sequences that may be admitted before one that waits, over its life


class Finish(NamedTuple):
    """How a sequence ended; decided once, when its last token is appended or it is aborted.

    Attributes:
        stop_reason: the stop token id or stop string, if `reason` is "stop".
        text_cut: characters to drop from the end of the text: the stop string.
        omit_stop_token: leave the last token out of the text.
        error: the exception, if `reason` is "error".
    """

    reason: FinishReason
    stop_reason: int | str | None = None
    text_cut: int = 0
    omit_stop_token: bool = False
    error: Exception | None = None


class Request:
    """One sequence: its tokens, how far they are computed, and its state by owner.

    There is no prefill or decode phase: the scheduler advances `num_computed_tokens` up to
    `num_tokens`, plus tokens that a step in flight samples. While the sequence runs, `counters` and
    `tokens` are views of its slot in `SeqSlots`, where a step changes them for all rows at once.
    Only the scheduler assigns `slot` and `forks`; the KV cache manager writes `kv`. A request's
    first sequence alone has `prompt_scores`.

    Attributes:
        waits: it computes nothing until other sequences of its request have; it is in no queue.
        is_beam: its log-probabilities are those that beams are ranked by.
        num_tokens: length of `token_ids`.
        num_computed_tokens: tokens in the KV cache, when the steps in flight are over.
        num_released_tokens: output tokens released to the client.
        num_state_tokens: tokens that its state has consumed, in layers that keep one: those of
            `num_computed_tokens` but drafts that were accepted in the last step.
    """

    num_tokens = Counter(0)
    num_computed_tokens = Counter(1)
    num_released_tokens = Counter(2)
    num_state_tokens = Counter(3)
    waits = False
    is_beam = False

    def __init__(
        self,
        uid: int,
        prompt_token_ids: NDArray[np.int32],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        index: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        arrival_time: float | None = None,
        stream: bool = True,
        stop_checker: StopChecker | None = None,
        tracker: OutputTracker | None = None,
        bad_words: BadWords | None = None,
        thinking: ThinkingBudget | None = None,
        window_ids: Sequence[int] = (),
    ) -> None:
        """Start a sequence with nothing computed.

        Args:
            uid: names the request that the sequence belongs to.
            prompt_token_ids: [P], not copied until the sequence runs, so that siblings share it.
            max_tokens: output tokens at most, already limited by the context length.
            seed: of this sequence's random draws.
            stop_token_ids: tokens that end it, including the model's end-of-sequence ids.
            index: of the request's `n` sequences, from 0.
            cache_salt: only requests with the same salt share cached prefixes.
            tenant: shares the slots equally with the others.
            arrival_time: in seconds of `time.monotonic()`; None: now.
            bad_words: token sequences that must not be produced; None: there are none.
            thinking: bounds the reasoning that `tracker` follows; None: unlimited.
            window_ids: last tokens of the prompt, the context needed to decode the output.
        """
        self.uid = uid
        self.index = index
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.priority = priority
        self.cache_salt = cache_salt
        self.tenant = tenant
        self.stream = stream
        self.bad_words = bad_words
        self.thinking = thinking
        self.grammar: SequenceGrammar | None = None  # before it runs, if the request asks for one
        self.processors: Sequence[AskedProcessor] = ()

        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + max_tokens  # of prompt and output
        self.tokens = prompt_token_ids  # prompt, then output, then unused
        self.counters = np.zeros(NUM_COUNTERS, dtype=np.int32)
        self.num_tokens = self.num_prompt_tokens
        self.slot: int | None = None  # while it runs: its row in the tables of host and device
        self.forks: list[Request] = []  # siblings that wait for this one's prompt KV

        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.prompt_scores: PromptScores | None = None  # to be found, or to be handed out
        self.kv = RequestKV()
        self.output = RequestOutput(list(window_ids), stop_checker, tracker)
        self.times = RequestTimes(time.monotonic() if arrival_time is None else arrival_time)

        self.finish: Finish | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it is unfinished."""
        return self.finish and self.finish.reason

    @property
    def is_awaited(self) -> bool:
        """Whether running sequences of its request cannot go on without it."""
        return False

    @property
    def companions(self) -> Sequence[Request]:
        """The sequences for which `is_awaited` changes when this one begins or ceases to run."""
        return ()

    @property
    def is_overdue(self) -> bool:
        """Whether as many later sequences were admitted before it as may be."""
        return self.times.num_bypassed >= MAX_BYPASSED

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Prompt and output tokens so far, without those in flight: a view."""
        return self.tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, without those in flight."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Number of top log-probabilities per token; None: no log-probabilities."""
        return self.sampling_params.logprobs

    @property
    def host_chooses(self) -> bool:
        """Whether the host takes part in choosing the next tokens."""
        if self.bad_words or self.grammar or self.processors:
            return True
        return self.thinking is not None and self.thinking.host_chooses

    @property
    def takes_drafts(self) -> bool:
        """Whether several of its tokens may be drawn in one step: the host has no part in them."""
        has_many_stops = len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS
        return not (
            self.bad_words
            or self.grammar
            or self.processors
            or self.thinking
            or self.is_beam
            or (self.sampling_params.min_tokens and has_many_stops)
        )

    @property
    def required_token(self) -> int | None:
        """The token that its thinking budget has come next; None: any may."""
        return None if self.thinking is None else self.thinking.forced

    @property
    def is_watched(self) -> bool:
        """Whether the host looks at each token, for more than the device and stop strings."""
        return (
            self.output.tracker is not None
            or self.grammar is not None
            or bool(self.processors)
            or self.prompt_scores is not None
            or len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS
        )

    def examine(self, token_id: int, ended: FinishReason | None) -> None:
        """Look at the newest token, and set `finish` if the sequence ends with it.

        The end of its grammar ends it; the token belongs to the text then. So does any error of
        the grammar, a logits processor or the tokenizer's decoder, which run on its own data.

        Args:
            token_id: the last of `token_ids`.
            ended: "stop" or "length" if the device has ended the sequence with it.
        """
        assert self.finish is None
        if self.sampling_params.max_tokens == 0:  # the token has ended the sequence, and is dropped
            self.num_tokens -= 1
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
            self.finish = Finish("length")
            return
        ended = self._ended(token_id, ended, self.num_output_tokens)
        try:
            for asked in self.processors:
                asked.check()
            is_over = False
            if self.grammar is not None and ended == "stop":
                self.grammar.check_stop(token_id)
            elif self.grammar is not None:
                is_over = self.grammar.take(token_id)
            self.finish = self._finish_with(token_id, "length" if is_over else ended)
            if is_over and self.finish == Finish("length"):
                self.finish = Finish("stop")
            if self.output.tracker is not None and self.finish is None:
                stop = self.output.stop_checker
                self.output.tracker.append(token_id, stop.num_held_tokens if stop else 0)
                if self.thinking is not None:
                    self.thinking.append(token_id)
        except Exception as error:
            self.finish = Finish("error", error=error)

    def grammar_of(self, token_id: int, ended: FinishReason | None) -> SequenceGrammar | None:
        """Return the grammar that has to follow a token that was drawn; None if there is none.

        A token that stops the sequence is not of its grammar; `ended` as in `examine`.
        """
        if self._ended(token_id, ended, self.num_output_tokens + 1) == "stop":
            return None
        return self.grammar

    def _ended(
        self, token_id: int, ended: FinishReason | None, num_output_tokens: int
    ) -> FinishReason | None:
        """Return how the last of `num_output_tokens` ends the sequence, if it is `ended` so far.

        The device does not know all stop tokens if there are many.
        """
        min_tokens = self.sampling_params.min_tokens
        stops = token_id in self.stop_token_ids and num_output_tokens > min_tokens
        return "stop" if stops else ended

    @property
    def takes_forced_tokens(self) -> bool:
        """Whether tokens that its grammar forces need no forward pass to be chosen."""
        params = self.sampling_params
        return (
            self.grammar is not None
            and self.num_top_logprobs is None
            # These may contradict the grammar.
            and params.allowed_token_ids is None
            and not self.processors
        )

    def forced_tokens(self) -> list[int]:
        """Return the tokens that its grammar forces next; an error of the grammar ends it."""
        assert self.grammar is not None
        try:
            return self.grammar.forced()
        except Exception as error:
            self.finish = Finish("error", error=error)
            return []

    def force(self, token_id: int) -> None:
        """Append a token while the sequence runs, as if a step had sampled it."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        self.examine(token_id, "length" if self.num_tokens == self.max_num_tokens else None)

    def abort(self) -> None:
        """End the sequence. Text that was held back is not searched for stop strings."""
        assert self.finish is None
        self.finish = Finish("abort")

    def _finish_with(self, token_id: int, ended: FinishReason | None) -> Finish | None:
        """Return how the sequence ends with its newest token; None if it continues.

        Stop strings take precedence: the text of a stop token comes after all other text.
        """
        checker = self.output.stop_checker
        keeps_stop = self.sampling_params.include_stop_str_in_output
        omit_stop_token = ended == "stop" and not keeps_stop
        if checker is not None:
            if not omit_stop_token:
                checker.skip(self.num_output_tokens - 1 - checker.num_tokens)
                checker.append(token_id)
            if ended is not None or checker.match is not None:
                text_cut = checker.finish()  # text that was held back may complete a stop string
                if checker.match is not None:
                    return Finish("stop", checker.match.stop, text_cut, omit_stop_token)
        if ended == "stop":
            return Finish("stop", token_id, omit_stop_token=omit_stop_token)
        return ended and Finish(ended)

    def results(self) -> Sequence[Request]:
        """Return the sequences to hand out after a change of this one, of which some are new."""
        return (self,)

    @property
    def num_releasable_tokens(self) -> int:
        """Output tokens that may be released to the client now."""
        if self.finish is not None:
            return self.num_output_tokens
        if not self.stream:
            return 0
        # The tracker holds what the checker of stop strings holds, too.
        holder = self.output.tracker or self.output.stop_checker
        return self.num_output_tokens - (0 if holder is None else holder.num_held_tokens)
