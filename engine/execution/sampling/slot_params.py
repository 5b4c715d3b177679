"""The sampling parameters of the sequences in the slots, on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.core.schedule import Admissions
from engine.execution.sampling.logits_processors import Bias, PenaltyParams
from engine.execution.sampling.step_arrays import RequestArray

# Bits of `SlotParams.features`; most sequences have none set.
FILTERS, ALLOWED, BIAS, PENALTIES, LOGPROBS = (1 << bit for bit in range(5))


class SlotParams:
    """The parameters of the sequence in each of S slots, in arrays that a step indexes by slot.

    Attributes:
        features: [S], bits of FILTERS ... LOGPROBS that a sequence uses.
        num_top_logprobs: [S].
        allowed_token_ids, bias: of the slots that use them.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        """Start with all slots free."""
        self._vocab_size = vocab_size
        self.features = np.zeros(num_slots, dtype=np.int32)
        self.num_top_logprobs = np.zeros(num_slots, dtype=np.int32)
        self.allowed_token_ids: dict[int, RequestArray] = {}
        self.bias: dict[int, Bias] = {}
        self._repetition = np.zeros(num_slots, dtype=np.float32)
        self._presence = np.zeros(num_slots, dtype=np.float32)
        self._frequency = np.zeros(num_slots, dtype=np.float32)

    def admit(self, admissions: Admissions) -> None:
        """Replace the parameters in the slots of `admissions`."""
        slots = admissions.slots
        self._repetition[slots] = admissions.repetition_penalty
        self._presence[slots] = admissions.presence_penalty
        self._frequency[slots] = admissions.frequency_penalty
        self.num_top_logprobs[slots] = admissions.num_top_logprobs.clip(max=self._vocab_size)
        for item, slot in enumerate(slots.tolist()):
            for lists in (self.allowed_token_ids, self.bias):
                lists.pop(slot, None)
            self.features[slot] = self._features(item, slot, admissions)

    def _features(self, item: int, slot: int, admissions: Admissions) -> int:
        features = 0
        filtered = (
            admissions.top_k[item] > 0 or admissions.top_p[item] < 1 or admissions.min_p[item] > 0
        )
        if filtered and admissions.temperature[item] > 0:
            features |= FILTERS
        if admissions.is_constrained[item]:
            features |= ALLOWED
            allowed = admissions.allowed_token_ids[item].astype(np.int64)
            self.allowed_token_ids[slot] = RequestArray(allowed)
        biased = admissions.bias_token_ids[item]
        if len(biased):
            features |= BIAS
            start = admissions.bias_token_ids.start_loc[item]
            values = admissions.bias_values[start : start + len(biased)]
            self.bias[slot] = Bias(RequestArray(biased), RequestArray(values))
        if (
            admissions.repetition_penalty[item] != 1.0
            or admissions.presence_penalty[item] != 0.0
            or admissions.frequency_penalty[item] != 0.0
        ):
            features |= PENALTIES
        if admissions.num_top_logprobs[item] >= 0:
            features |= LOGPROBS
        return features

    def penalties(self, slots: NDArray[np.int32]) -> PenaltyParams:
        """Return the penalties of `slots`, [R]."""
        penalised = self.features[slots] & PENALTIES != 0
        return PenaltyParams(
            slots=np.where(penalised, slots, np.int32(-1)),
            repetition=self._repetition[slots],
            presence=self._presence[slots],
            frequency=self._frequency[slots],
        )
