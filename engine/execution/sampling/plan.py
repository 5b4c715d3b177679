"""What a step asks of the sampler, and what comes back from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.request import SampledToken
from engine.execution.sampling.adjustment import Adjustment
from engine.execution.sampling.draw import Draw
from engine.execution.sampling.logprobs import Logprobs, LogprobsPlan
from engine.execution.sampling.masks import Mask
from engine.execution.sampling.step_arrays import StepArrays
from engine.execution.sampling.token_history import Admissions


class Samples(NamedTuple):
    """What was drawn for R rows; tensors on the device, or on the host."""

    token_ids: Tensor  # int64 [R]
    logprobs: Logprobs | None  # of the rows that ask for them

    def to_host(self) -> Samples:
        """Return a copy in pinned memory, or this one if it is on the host already.

        The copy is complete when the device has passed it: record an event and wait for that.
        """
        if self.token_ids.device.type == "cpu":
            return self
        logprobs = self.logprobs and Logprobs(*map(_to_host, self.logprobs))
        return Samples(_to_host(self.token_ids), logprobs)


def _to_host(tensor: Tensor) -> Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """What the R rows of a step ask for. Made by `Sampler.plan`, for one `Sampler.sample`.

    Attributes:
        arrays: what the step needs of the host, for all parts of the plan.
        admissions: sequences with penalties that have taken their slots since the last plan.
        masks: what must not come next; applied in this order.
        adjustment: biases and penalties.
        counts_output: whether a row has penalties, and its token is to be counted.
        draw: the draw of the tokens.
        logprobs: the rows that want to know how likely their tokens were.
    """

    arrays: StepArrays
    admissions: Admissions | None
    masks: Sequence[Mask]
    adjustment: Adjustment | None
    counts_output: bool
    draw: Draw
    logprobs: LogprobsPlan | None

    def read(self, samples: Samples) -> list[SampledToken]:
        """Return the token of each row, in order; `samples` are on the host and complete."""
        token_ids: list[int] = samples.token_ids.tolist()
        sampled = [SampledToken(token_id, 0.0) for token_id in token_ids]
        if self.logprobs is not None:
            assert samples.logprobs is not None
            found = self.logprobs.read(samples.logprobs, token_ids)
            for row, logprobs in zip(self.logprobs.rows, found, strict=True):
                sampled[row] = SampledToken(token_ids[row], logprobs.logprobs[0], logprobs)
        return sampled
