"""A step that has been launched, and the copy of its tokens to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.core.schedule import SampledLogprobs, Samples, Schedule
from engine.execution.sampling.logprobs import Logprobs
from engine.execution.sampling.sampler import SamplePlan


@dataclass(frozen=True, slots=True)
class LaunchedForward:
    """A forward pass that has been launched.

    Attributes:
        results: returns the last hidden state and the slot of each row; called on the queue.
    """

    schedule: Schedule
    results: Callable[[], tuple[Tensor, Tensor]]


class Sent(Protocol):
    """Samples that are on the host once the step has run."""

    def wait(self) -> Samples:
        """Wait for them, and return them."""


class SentSamples:
    """Samples that the device copies to the host after it has computed them."""

    def __init__(
        self, plan: SamplePlan, token_ids: Tensor, finish_reasons: Tensor, logprobs: Logprobs | None
    ) -> None:
        """Copy the results of the rows of `plan` on the current stream, without waiting for it."""
        self._plan = plan
        self._token_ids = _to_host(token_ids)
        self._finish_reasons = _to_host(finish_reasons)
        self._logprobs = logprobs and Logprobs(*map(_to_host, logprobs))
        self._event: torch.cuda.Event | None = None
        if token_ids.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Samples:
        """Wait for the copy; return the samples of the rows that want one."""
        if self._event is not None:
            self._event.synchronize()
        plan, logprobs = self._plan, None
        if self._logprobs is not None:
            found, asked = self._logprobs, plan.logprobs
            assert asked is not None
            sample = np.cumsum(plan.wants_token, dtype=np.int32) - 1  # of each row
            logprobs = SampledLogprobs(
                rows=sample[asked.rows],
                logprobs=found.chosen.numpy(),
                ranks=found.ranks.int().numpy(),
                num_top=asked.num_top,
                top_token_ids=found.top_token_ids.int().numpy(),
                top_logprobs=found.top_logprobs.numpy(),
            )
        return Samples(
            self._token_ids.int().numpy()[plan.wants_token],
            self._finish_reasons.numpy()[plan.wants_token],
            logprobs,
        )


def _to_host(tensor: Tensor) -> Tensor:
    """Return a copy in pinned memory, made asynchronously, or the tensor if it is on the host."""
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose forward pass and sampling are launched."""

    launched: Callable[[], Sent]

    def wait(self) -> Samples:
        """Wait for the step and return its tokens."""
        return self.launched().wait()
