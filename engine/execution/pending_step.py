"""A step that has been launched, and the copy of its tokens to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress
from typing import Protocol

import torch

from engine.core.request import SampledToken
from engine.core.schedule import Schedule
from engine.execution.sampling.sampler import Samples
from engine.execution.step_plan import StepPlan


class Sent(Protocol):
    """Samples that are on the host once the step has run."""

    def wait(self) -> Samples:
        """Wait for them, and return them."""


class SentSamples:
    """Samples that the device copies to the host after it has computed them."""

    def __init__(self, samples: Samples) -> None:
        """Copy `samples` on the current stream, without waiting for it."""
        self._samples = samples.to_host()
        self._event: torch.cuda.Event | None = None
        if samples.token_ids.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Samples:
        """Wait for the copy, and return the samples on the host."""
        if self._event is not None:
            self._event.synchronize()
        return self._samples


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step launched by `ModelRunner.launch`."""

    schedule: Schedule
    plan: StepPlan
    launched: Callable[[], Sent | None]

    def wait(self) -> list[SampledToken]:
        """Wait for the step; return a token for each row that samples one, in order."""
        sent = self.launched()
        if sent is None:
            return []
        assert self.plan.samples is not None
        return list(compress(self.plan.samples.read(sent.wait()), self.plan.wants_token))
