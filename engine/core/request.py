"""Request: the engine's mutable state of one sequence while it is served."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.core.bad_words import BadWords
from engine.protocol import TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.text.stop import StopChecker

FinishReason = Literal["stop", "length", "abort", "error"]


class SampledToken(NamedTuple):
    """The token sampled for one sequence."""

    token_id: int
    logprob: float
    logprobs: TokenLogprobs | None = None  # if the request asked for them


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


@dataclass(slots=True)
class RequestKV:
    """Where the KV of a sequence is; written by the KV cache manager only.

    Attributes:
        block_ids: its block table.
        block_hashes: content hashes of its full blocks, as far as computed.
        num_committed_blocks: blocks entered in the prefix cache.
        host_block_ids: host blocks, while its KV is swapped out.
        num_swapped_tokens: tokens whose KV is in `host_block_ids`.
    """

    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0
    host_block_ids: list[int] = field(default_factory=list)
    num_swapped_tokens: int = 0


@dataclass(slots=True)
class RequestTimes:
    """Times of one sequence, in seconds of `time.monotonic()`; None: has not happened yet."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float = 0.0  # written with each step that gives a token


@dataclass(slots=True)
class RequestOutput:
    """The part of a sequence that was released to the client, and the state to release more.

    Attributes:
        window_ids: tokens before the next ones, the context needed to decode these.
        stop_checker: if the request has stop strings.
        num_released_tokens: output tokens released to the client.
        logprobs: of the output tokens not released yet, if the request asked for them.
        cumulative_logprob: sum over all output tokens.
    """

    window_ids: list[int]
    stop_checker: StopChecker | None = None
    num_released_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cumulative_logprob: float = 0.0


class Request:
    """One sequence: its tokens, how far they are computed, and its state by owner.

    There is no prefill or decode phase: the scheduler advances `num_computed_tokens` up to
    `num_tokens`, plus tokens that a step in flight samples. Only the scheduler writes
    `num_computed_tokens`, `num_unread_tokens`, `slot` and `forks`; the KV cache manager writes
    `kv`; `output` changes as tokens are appended and released.
    """

    def __init__(
        self,
        uid: int,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        seed: int,
        stop_token_ids: frozenset[int] = frozenset(),
        index: int = 0,
        priority: int = 0,
        cache_salt: str = "",
        arrival_time: float | None = None,
        stream: bool = True,
        stop_checker: StopChecker | None = None,
        bad_words: BadWords | None = None,
        window_ids: Sequence[int] = (),
    ) -> None:
        """Start a sequence with nothing computed.

        Args:
            uid: names the request that the sequence belongs to.
            prompt_token_ids: not copied until the sequence runs, so that siblings share it.
            max_tokens: output tokens at most, already limited by the context length.
            seed: of this sequence's random draws.
            stop_token_ids: tokens that end it, including the model's end-of-sequence ids.
            index: of the request's `n` sequences, from 0.
            cache_salt: only requests with the same salt share cached prefixes.
            arrival_time: in seconds of `time.monotonic()`; None: now.
            bad_words: token sequences that must not be produced; None: there are none.
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
        self.stream = stream
        self.bad_words = bad_words

        self.token_ids = prompt_token_ids  # prompt, then output
        self.num_prompt_tokens = len(self.token_ids)
        self.max_num_tokens = self.num_prompt_tokens + max_tokens  # of prompt and output
        self.num_computed_tokens = 0  # in the KV cache, when the steps in flight are over
        self.num_unread_tokens = 0  # sampled by steps in flight: on the device, not in token_ids
        self.slot: int | None = None  # while it runs: its row in the tables of the device
        self.forks: list[Request] = []  # siblings that wait for this one's prompt KV

        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.kv = RequestKV()
        self.output = RequestOutput(list(window_ids), stop_checker)
        self.times = RequestTimes(time.monotonic() if arrival_time is None else arrival_time)

        self.finish: Finish | None = None

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it is unfinished."""
        return self.finish and self.finish.reason

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far, without the unread ones."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far, without the unread ones."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.token_ids) + self.num_unread_tokens - self.num_computed_tokens

    @property
    def must_be_read(self) -> bool:
        """Whether the token in flight must be read before the next step of the sequence.

        Because it may be the last one, or because the host takes part in choosing the next.
        """
        return self.num_unread_tokens > 0 and (
            len(self.token_ids) + self.num_unread_tokens >= self.max_num_tokens
            or self.bad_words is not None
        )

    def mark_scheduled(self) -> None:
        """Record the first time that the sequence runs, and its hits in the prefix cache."""
        self.times.first_scheduled = time.monotonic()
        self.token_ids = list(self.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, self.num_computed_tokens)

    def append(self, sampled: SampledToken) -> None:
        """Add a sampled token, and set `finish` if the sequence ends with it.

        May raise any error of the tokenizer's decoder; then `fail` ends the request.
        """
        assert self.finish is None
        self.token_ids.append(sampled.token_id)
        self.output.cumulative_logprob += sampled.logprob
        if sampled.logprobs is not None:
            self.output.logprobs.append(sampled.logprobs)
        if self.times.first_token is None:
            self.times.first_token = time.monotonic()
        self.finish = self._finish_with(sampled.token_id)

    def abort(self) -> None:
        """End the sequence. Text that was held back is not searched for stop strings."""
        assert self.finish is None
        self.finish = Finish("abort")

    def fail(self, error: Exception) -> None:
        """End the sequence because of `error`, which its own data caused."""
        self.finish = Finish("error", error=error)

    def _finish_with(self, token_id: int) -> Finish | None:
        """Return how the sequence ends with its newest token; None if it continues.

        Stop strings take precedence: the text of a stop token comes after all other text.
        """
        checker = self.output.stop_checker
        is_stop_token = (
            token_id in self.stop_token_ids
            and self.num_output_tokens > self.sampling_params.min_tokens
        )
        omit_stop_token = is_stop_token and not self.sampling_params.include_stop_str_in_output
        is_last = is_stop_token or len(self.token_ids) >= self.max_num_tokens
        if checker is not None:
            if not omit_stop_token:
                checker.append(token_id)
            if is_last or checker.match is not None:
                text_cut = checker.finish()  # text that was held back may complete a stop string
                if checker.match is not None:
                    return Finish("stop", checker.match.stop, text_cut, omit_stop_token)
        if is_stop_token:
            return Finish("stop", token_id, omit_stop_token=omit_stop_token)
        return Finish("length") if is_last else None

    @property
    def num_releasable_tokens(self) -> int:
        """Output tokens that may be released to the client now."""
        checker = self.output.stop_checker
        if self.finish is not None:
            return self.num_output_tokens
        if not self.stream:
            return 0
        return self.num_output_tokens - (0 if checker is None else checker.num_held_tokens)
