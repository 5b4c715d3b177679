"""Interfaces of a runner of steps, and of a launched step whose tokens are being copied back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.core.logprobs.scored_tokens import ScoredLogprobs
from engine.core.schedule import SampledLogprobs, SamplerOutput, SamplingBatch, SchedulerOutput
from engine.execution.downloads import Download, Downloads
from engine.execution.sampler import Drawn, SamplePlan
from engine.layers.rank_group import RankGroup
from engine.nvtx import nvtx_range


class PromptResults(NamedTuple):
    """What a step finds of prompts, on its way to the host; None: nothing.

    Attributes:
        logprobs: the columns of `ScoredLogprobs`.
        hidden: float32 [E, hidden_size], of `SchedulerOutput.embedded`.
    """

    logprobs: Download | None = None
    hidden: Download | None = None


NO_PROMPTS = PromptResults()


class ForwardResults(NamedTuple):
    """Results of a forward pass; rows after those of the step are padding.

    Attributes:
        hidden: [R, hidden_size], the last hidden state of each row; of a step with drafts that of
            each token.
        slots: int32 [R], the slot whose token is sampled from the row; -1 if none is.
        in_graph: whether they are where the graphs of the sampling read them.
        prompts: what it has found of them.
    """

    hidden: Tensor
    slots: Tensor
    in_graph: bool
    prompts: PromptResults = NO_PROMPTS


class PendingStep:
    """A step that has been launched; the device copies its samples to the host.

    Attributes:
        drafted: the draws behind the first, second ... drafts of the step.
    """

    def __init__(self, plan: SamplePlan, download: Download, prompts: PromptResults) -> None:
        """Read the tokens and finish reasons of the rows of `plan`, and its log-probabilities."""
        self._plan = plan
        self._download = download
        self._prompts = prompts
        self.drafted: Sequence[PendingStep] = ()

    @classmethod
    def of(
        cls,
        plan: SamplePlan,
        drawn: Drawn,
        finish_reasons: Tensor,
        downloads: Downloads,
        prompts: PromptResults = NO_PROMPTS,
    ) -> PendingStep:
        """Copy the results of `plan` to the host, without waiting for it."""
        tensors = [drawn.token_ids, finish_reasons]
        if drawn.logprobs is not None:
            found = drawn.logprobs
            tensors += [found.chosen, found.ranks, found.top_token_ids.int()]
            tensors.append(found.top_logprobs)
        return cls(plan, downloads.start(tensors), prompts)

    @nvtx_range("wait")
    def wait(self) -> SamplerOutput:
        """Wait for the copy; return the samples of the rows that want one."""
        token_ids, finish_reasons, *found = self._download.wait()
        plan, logprobs = self._plan, None
        rows = np.flatnonzero(plan.wants_token)
        if len(plan.logprobs_rows):
            chosen, ranks, top_token_ids, top_logprobs = found
            sample = np.cumsum(plan.wants_token, dtype=np.int32) - 1  # of each row
            logprobs = SampledLogprobs(
                rows=sample[plan.logprobs_rows],
                logprobs=chosen,
                ranks=ranks,
                num_top=plan.num_top_logprobs,
                top_token_ids=top_token_ids,
                top_logprobs=top_logprobs,
            )
        scored, hidden = self._prompts
        return SamplerOutput(
            token_ids=token_ids[rows].astype(np.int32),
            finish_reasons=finish_reasons[rows],
            logprobs=logprobs,
            prompt_logprobs=None if scored is None else ScoredLogprobs(*scored.wait()),
            hidden=None if hidden is None else hidden.wait()[0],
            drafted=tuple(each.wait() for each in self.drafted),
        )


class Runner(Protocol):
    """Runs the scheduled steps, in order: for each a call of `forward`, then one of `sample`."""

    def forward(self, schedule: SchedulerOutput) -> None:
        """Launch the forward pass of a step with at least one row, without waiting for it."""

    def sample(self, sampling: SamplingBatch) -> PendingStep:
        """Launch the sampling of the step whose forward pass was launched last."""

    def expert_counts(self) -> NDArray[Any] | None:
        """Return how often each expert was chosen, as `ExpertCounts.read`."""


class Ranks(Protocol):
    """Other ranks of the model that a runner runs."""

    @property
    def group(self) -> RankGroup:
        """What they exchange."""

    def lead(self, runner: Runner) -> Runner:
        """Return a runner that has the other ranks run each step with `runner`."""

    def take_waits(self) -> list[float]:
        """Return how many seconds each rank has waited for the others since the last call."""
