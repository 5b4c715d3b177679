"""The sampling parameters of the sequences in the slots, on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.core.request import Request
from engine.execution.sampling.draw import DrawParams
from engine.execution.sampling.logits_processors import BadWords, Bias, PenaltyParams
from engine.execution.sampling.step_arrays import RequestArray
from engine.sampling_params import SamplingParams

# Bits of `SlotParams.features`; most sequences have none set.
ALLOWED, BAD_WORDS, MIN_TOKENS, BIAS, PENALTIES, LOGPROBS = (1 << bit for bit in range(6))


class SlotParams:
    """The parameters of the sequence in each of S slots, in arrays that a step indexes by slot.

    Attributes:
        features: [S], bits of ALLOWED ... LOGPROBS that a sequence uses.
        min_tokens, num_top_logprobs: [S].
        allowed_token_ids, stop_token_ids, bad_words, bias: of the slots that use them.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """Start with all slots free."""
        self._vocab_size = vocab_size
        self.features = np.zeros(num_slots, dtype=np.int32)
        self.min_tokens = np.zeros(num_slots, dtype=np.int64)
        self.num_top_logprobs = np.zeros(num_slots, dtype=np.int64)
        self.allowed_token_ids: dict[int, RequestArray] = {}
        self.stop_token_ids: dict[int, RequestArray] = {}
        self.bad_words: dict[int, BadWords] = {}
        self.bias: dict[int, Bias] = {}
        self._temperature = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int32)
        self._top_p = np.zeros(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._repetition = np.zeros(num_slots, dtype=np.float32)
        self._presence = np.zeros(num_slots, dtype=np.float32)
        self._frequency = np.zeros(num_slots, dtype=np.float32)

    def admit(self, slot: int, request: Request) -> None:
        """Replace the parameters in `slot` by those of `request`."""
        params = request.sampling_params
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seed[slot] = request.seed
        for lists in (self.allowed_token_ids, self.stop_token_ids, self.bad_words, self.bias):
            lists.pop(slot, None)
        self.features[slot] = self._admit_features(slot, request)

    def _admit_features(self, slot: int, request: Request) -> int:
        params, features = request.sampling_params, 0
        if params.allowed_token_ids is not None:
            features |= ALLOWED
            self.allowed_token_ids[slot] = RequestArray(request.allowed_token_ids)
        if request.bad_words:
            features |= BAD_WORDS
            self.bad_words[slot] = BadWords(request.bad_words, self._vocab_size)
        stop_token_ids = [token for token in request.stop_token_ids if token < self._vocab_size]
        if params.min_tokens and stop_token_ids:
            features |= MIN_TOKENS
            self.min_tokens[slot] = params.min_tokens
            self.stop_token_ids[slot] = RequestArray(np.array(stop_token_ids, dtype=np.int64))
        if params.logit_bias:
            features |= BIAS
            self.bias[slot] = Bias(params.logit_bias)
        if _has_penalties(params):
            features |= PENALTIES
            with np.errstate(over="ignore"):  # infinity is right
                self._repetition[slot] = params.repetition_penalty
            self._presence[slot] = params.presence_penalty
            self._frequency[slot] = params.frequency_penalty
        if params.logprobs is not None:
            features |= LOGPROBS
            self.num_top_logprobs[slot] = min(params.logprobs, self._vocab_size)
        return features

    def draws(self, slots: NDArray[np.int32], num_output_tokens: NDArray[np.int64]) -> DrawParams:
        """Return the draw parameters of `slots`, [R]."""
        return DrawParams(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seed[slots],
            positions=num_output_tokens,
        )

    def penalties(self, slots: NDArray[np.int32]) -> PenaltyParams:
        """Return the penalties of `slots`, [R]."""
        penalised = self.features[slots] & PENALTIES != 0
        return PenaltyParams(
            slots=np.where(penalised, slots, np.int32(-1)),
            repetition=self._repetition[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
        )


def _has_penalties(params: SamplingParams) -> bool:
    """Return whether any penalty has an effect."""
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
