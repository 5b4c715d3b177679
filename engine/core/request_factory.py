"""RequestFactory: from a validated message to the sequences that the scheduler serves."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Iterable

from engine.errors import RequestError
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.service.messages import AddRequest
from engine.text.detokenizer import Detokenizer
from engine.text.stop import StopAutomaton, StopChecker
from engine.text.tokenizer import Tokenizer
from engine.validation import check_token_ids


class RequestFactory:
    """Checks a request against the model and builds its `n` sequences."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        *,
        eos_token_ids: Collection[int],
        vocab_size: int,
        max_model_len: int,
        max_logprobs: int,
        seeds: random.Random,
    ) -> None:
        """Build requests for one model; `seeds` serves those that bring no seed."""
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_logprobs = max_logprobs
        self._seeds = seeds

    def build(self, message: AddRequest) -> list[Request]:
        """Return the sequences of a request.

        Raises:
            RequestError: naming the field that does not suit the model, and the limit.
        """
        params = SamplingParams.parse(message.sampling_params)
        prompt = message.prompt_token_ids
        self._check(prompt, params)
        room = self._max_model_len - len(prompt)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._seeds.getrandbits(64) if params.seed is None else params.seed
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        timeout = message.timeout_s
        bad_words = self._tokenize_bad_words(params.bad_words)
        stop = StopAutomaton(params.stop) if params.stop else None
        return [
            Request(
                message.uid,
                prompt,
                params,
                max_tokens=max_tokens,
                seed=(seed + index) % 2**64,
                stop_token_ids=eos | frozenset(params.stop_token_ids),
                index=index,
                priority=message.priority,
                deadline=None if timeout is None else time.monotonic() + timeout,
                stream=message.stream,
                stop_checker=self._stop_checker(prompt, params, stop) if stop else None,
                bad_words=bad_words,
            )
            for index in range(params.n)
        ]

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("input_ids: the prompt is empty")
        if len(prompt) >= self._max_model_len:
            raise RequestError(
                f"input_ids: the prompt has {len(prompt)} tokens; with at least one of output it "
                f"exceeds max_model_len ({self._max_model_len})"
            )
        for field, token_ids in (
            ("input_ids", prompt),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):
            check_token_ids(field, token_ids, self._vocab_size)
        if params.logprobs is not None and params.logprobs > self._max_logprobs:
            raise RequestError(
                f"logprobs: {params.logprobs} exceeds max_logprobs ({self._max_logprobs})"
            )

    def _stop_checker(
        self, prompt: list[int], params: SamplingParams, stop: StopAutomaton
    ) -> StopChecker:
        return StopChecker(
            self._detokenizer,
            prompt,
            stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _tokenize_bad_words(self, words: Iterable[str]) -> list[list[int]]:
        """A word is one sequence of tokens at the start of a line and another after a space."""
        sequences: list[list[int]] = []
        for word in words:
            for form in (word, " " + word.lstrip(" ")):
                token_ids = self._tokenizer.encode(form, add_special_tokens=False)
                if token_ids and token_ids not in sequences:
                    sequences.append(token_ids)
        return sequences
