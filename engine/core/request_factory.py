"""RequestFactory: makes the sequences that the scheduler serves from a validated message."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.beams.beam import Beam, BeamGroup
from engine.core.beams.beam_search import BeamSearch
from engine.core.constraints.bad_words import BadWords
from engine.core.constraints.processors import Processors
from engine.core.constraints.thinking_budget import ThinkingBudget
from engine.core.logprobs.prompt_scores import PromptScores
from engine.core.request import Request
from engine.errors import RequestError, UnsupportedError
from engine.logits_processors import LogitsProcessor
from engine.models.pooling import BOTH, Task
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import TokenIds, unpack_token_ids
from engine.request.sampling_params import SamplingParams
from engine.text.detokenizer import Detokenizer
from engine.text.grammar.after_reasoning import after_reasoning
from engine.text.output_parsing.chunk_parser import state_after_prompt
from engine.text.output_parsing.parser import ParserState
from engine.text.output_parsing.parser_spec import ParserSpec
from engine.text.output_parsing.tracker import OutputTracker
from engine.text.stop.automaton import StopAutomaton
from engine.text.stop.checker import StopChecker
from engine.text.tokenizer import Tokenizer
from engine.validation.checks import check_token_ids
from engine.validation.limits import (
    MAX_LOGPROBS_AT_ONCE,
    MAX_OUTPUT_TOKENS,
    MAX_PROMPT_TOKENS,
    check_cache_salt,
    check_length,
    check_size,
    check_tenant,
)

_MAX_AUTOMATA = 32  # each takes up to 4 MB, of `stop` at its limit


@dataclass(slots=True)
class Candidates:
    """The sequences of one request, of which the best are handed out: `ended` of `count`."""

    count: int = 0
    ended: list[Request] = field(default_factory=list)


class Candidate(Request):
    """A sequence that is returned if its mean log-probability is among the `n` highest."""

    def __init__(
        self,
        uid: int,
        prompt_token_ids: NDArray[np.int32],
        sampling_params: SamplingParams,
        *,
        group: Candidates,
        **settings: Any,
    ) -> None:
        """Join `group`; the rest is as for any `Request`. Nothing is streamed."""
        super().__init__(uid, prompt_token_ids, sampling_params, **{**settings, "stream": False})
        self._group = group
        group.count += 1

    @property
    def num_top_logprobs(self) -> int:
        """Its own log-probabilities are always found."""
        return self.sampling_params.logprobs or 0

    def results(self) -> Sequence[Request]:
        """Return the best sequences if the last one has ended, numbered by rank."""
        if self.finish is None:
            return ()
        if self.finish.error is not None:
            return (self,)  # and so the request fails
        group = self._group
        group.ended.append(self)
        if len(group.ended) < group.count:
            return ()
        group.ended.sort(key=lambda each: each.index)
        prompt_scores = group.ended[0].prompt_scores
        best = sorted(group.ended, key=_rank)[: self.sampling_params.n]
        for index, each in enumerate(best):
            each.index = index
            each.prompt_scores = None if index else prompt_scores
        return best


def _rank(request: Request) -> tuple[bool, float]:
    """Smaller is better; what was aborted comes last."""
    num_tokens = request.num_output_tokens
    mean = request.output.cumulative_logprob / num_tokens if num_tokens else -math.inf
    return request.finish_reason == "abort", -mean


class RequestFactory:
    """Checks a request against the model and builds its `n` sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        parser_spec: ParserSpec,
        *,
        eos_token_ids: Collection[int],
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        draw_seed: Callable[[], int],
        min_priority: int | None = None,
        processors: Mapping[str, LogitsProcessor] = {},
        task: Task = BOTH,
    ) -> None:
        """Build requests for one model.

        `draw_seed` returns a seed for a request without one; `processors` are those installed.
        """
        self._task = task
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._parser_spec = parser_spec
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._min_priority = min_priority
        self._draw_seed = draw_seed
        self._processors = Processors(processors, detokenizer.token_text)
        self._stop_automaton = lru_cache(_MAX_AUTOMATA)(StopAutomaton)  # shared by equal `stop`

    def build(self, message: AddRequest) -> list[Request]:
        """Return the sequences of a request.

        Raises:
            RequestError: naming the field that does not suit the model, and the limit.
        """
        params = SamplingParams.parse(message.sampling_params)
        if params.beam_width > 1:
            params = params.model_copy(update={"temperature": 0.0})  # what is drawn is dropped
        if params.return_embedding:
            params = params.model_copy(update={"max_tokens": 0})
        prompt = unpack_token_ids(message.prompt_token_ids, "input_ids")
        self._check(prompt, params)
        self._processors.check(params)
        if message.cache_salt:
            check_cache_salt(message.cache_salt)
        if message.tenant:
            check_tenant(message.tenant)
        # Refused rather than raised to the limit, so that the client knows.
        if self._min_priority is not None and message.priority < self._min_priority:
            raise RequestError(
                f"must be at least {self._min_priority} (got {message.priority})", param="priority"
            )
        max_tokens = self._max_tokens(message, len(prompt), params)
        window = self._detokenizer.prompt_window(
            prompt, skip_special_tokens=params.skip_special_tokens
        )
        seed = self._draw_seed() if params.seed is None else params.seed
        # The end of a grammar is an end-of-sequence token, whatever follows for others.
        ignores_eos = params.ignore_eos and params.structured_outputs is None
        eos = frozenset() if ignores_eos else self._eos_token_ids
        stop_token_ids = eos | frozenset(params.stop_token_ids)
        bad_words = self._bad_words(params.bad_words)
        parser_state, budget = None, params.thinking_token_budget
        if params.return_sections or budget is not None:
            parser_state = state_after_prompt(self._parser_spec, self._detokenizer, prompt.tolist())
            if (spec := params.structured_outputs) is not None:
                spec = after_reasoning(spec, self._parser_spec, parser_state)
                params = params.model_copy(update={"structured_outputs": spec})
        new_sequence = _sequences(params, max_tokens, stop_token_ids)
        trackers = [
            None if parser_state is None else self._tracker(window, parser_state, params)
            for _ in range(params.num_sequences)
        ]
        requests = [
            new_sequence(
                message.uid,
                prompt,
                params,
                max_tokens=max_tokens,
                seed=(seed + index) % 2**64,
                stop_token_ids=stop_token_ids,
                index=index,
                priority=message.priority,
                cache_salt=message.cache_salt,
                tenant=message.tenant,
                arrival_time=message.arrival_time,
                stream=message.stream,
                stop_checker=self._stop_checker(window, params) if params.stop else None,
                tracker=tracker,
                bad_words=bad_words,
                thinking=(
                    None
                    if tracker is None or budget is None
                    else ThinkingBudget(budget, self._parser_spec, tracker)
                ),
                window_ids=window if window != prompt[-1:].tolist() else (),
            )
            for index, tracker in enumerate(trackers)
        ]
        for request in requests:
            request.processors = self._processors.asked(params)
        if params.prompt_logprobs is not None:
            requests[0].prompt_scores = PromptScores(
                prompt, min(params.prompt_logprobs, self._vocab_size)
            )
        return requests

    def _check(self, prompt: TokenIds, params: SamplingParams) -> None:
        if not len(prompt):
            raise RequestError("the prompt is empty", param="input_ids")
        check_length("input_ids", len(prompt), None, self._max_model_len)
        for param, token_ids in (
            ("input_ids", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            check_token_ids(param, token_ids, self._vocab_size)
        for param, count in (
            ("logprobs", params.logprobs),
            ("prompt_logprobs", params.prompt_logprobs),
        ):
            if count is not None and count > self._max_logprobs:
                raise RequestError(
                    f"must be at most the server's setting max_logprobs, {self._max_logprobs} (got "
                    f"{count})",
                    param=param,
                )
        if params.prompt_logprobs is not None:
            num_logprobs = len(prompt) * (params.prompt_logprobs + 1)
            check_size("prompt_logprobs", num_logprobs, MAX_LOGPROBS_AT_ONCE, "log-probabilities")
        if params.thinking_token_budget is not None:
            self._check_budget(params.allowed_token_ids)
        field, count = params.widest
        if params.return_embedding:
            if self._task.why_not_embedded:
                raise UnsupportedError(self._task.why_not_embedded, param="return_embedding")
            if count > 1:
                raise RequestError(f"must be 1 with return_embedding (got {count})", param=field)
        elif not self._task.generates:
            raise UnsupportedError(
                "the model does not support generation; use /v1/embeddings, or set "
                "return_embedding",
                param="model",
            )
        if (total := count * len(prompt)) > MAX_PROMPT_TOKENS:
            raise RequestError(
                f"{count} sequences of a prompt of {len(prompt)} tokens make {total} prompt "
                f"tokens; at most {MAX_PROMPT_TOKENS} are allowed",
                param=field,
            )

    def _check_budget(self, allowed: Collection[int] | None) -> None:
        end_ids = self._parser_spec.reasoning_end_ids
        if not end_ids:
            raise RequestError(
                "the model has no known reasoning tags; leave it out, or set reasoning_parser of "
                "the server",
                param="thinking_token_budget",
            )
        if max(end_ids) >= self._vocab_size or not (allowed is None or end_ids <= {*allowed}):
            raise RequestError(
                "needs the tokens of the tag that ends the reasoning; add them to "
                "allowed_token_ids",
                param="thinking_token_budget",
            )

    def _max_tokens(
        self, message: AddRequest, num_prompt_tokens: int, params: SamplingParams
    ) -> int:
        """Return the tokens to sample for each sequence: `max_tokens`, limited to what fits.

        At least one, which ends the sequence; with `max_tokens` 0 it is dropped.

        Raises:
            RequestError: it exceeds the limit of one request.
        """
        room = self._max_model_len - num_prompt_tokens
        field, count = params.widest
        limit = MAX_OUTPUT_TOKENS // count
        if params.logprobs is not None and not message.stream:
            limit = min(limit, MAX_LOGPROBS_AT_ONCE // (count * (params.logprobs + 1)))
        if params.max_tokens is None:
            return max(1, min(room, limit))
        if min(params.max_tokens, room) > limit:
            logprobs = "" if params.logprobs is None else f" and logprobs {params.logprobs}"
            raise RequestError(
                f"must be at most {limit} with {field} {count}{logprobs} (got {params.max_tokens})",
                param="max_tokens",
            )
        return max(1, min(params.max_tokens, room))

    def _stop_checker(self, window: list[int], params: SamplingParams) -> StopChecker:
        return StopChecker(
            self._detokenizer,
            window,
            self._stop_automaton(params.stop),
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _tracker(
        self, window: list[int], parser_state: ParserState, params: SamplingParams
    ) -> OutputTracker:
        return OutputTracker(
            self._parser_spec,
            self._detokenizer,
            window,
            parser_state,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _bad_words(self, words: Iterable[str]) -> BadWords | None:
        """A word is one sequence of tokens at the start of a line and another after a space."""
        spellings = (spelling for word in words for spelling in (word, " " + word.lstrip(" ")))
        encode = partial(self._tokenizer.encode, add_special_tokens=False, field="bad_words")
        sequences = dict.fromkeys(tuple(encode(spelling)) for spelling in spellings)
        # A word that ends with a token that the model does not have cannot be produced.
        possible = [ids for ids in sequences if ids and ids[-1] < self._vocab_size]
        return BadWords(possible) if possible else None


def _sequences(
    params: SamplingParams, max_tokens: int, stop_token_ids: Collection[int]
) -> Callable[..., Request]:
    """Return what makes the sequences of one request, in order."""
    if params.beam_width > 1:
        search = BeamSearch(
            params.beam_width,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=stop_token_ids,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            num_logprobs=params.logprobs,
        )
        return partial(Beam, group=BeamGroup(search))
    if params.num_sequences > params.n:
        return partial(Candidate, group=Candidates())
    return Request
