"""Prefill steps, and the time to first token (TTFT) of a single request."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from engine.bench import floors
from engine.bench.driver import EngineDriver
from engine.bench.floors import Ceilings
from engine.bench.part import Figures, TimedPart
from engine.bench.workload import prompts
from kernels.bench.case import Aim


@dataclass(frozen=True)
class Prefill(TimedPart):
    """The seconds to prefill `count` prompts in one step, from arrival to first tokens."""

    count: int

    @property
    def length(self) -> int:
        """Tokens per prompt."""
        return self.workload.prefill // self.count

    @property
    def name(self) -> str:
        return f"prefill, {self.count} x {self.length} tokens"

    @property
    def aim(self) -> Aim | None:
        return Aim(share=0.6)

    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        return floors.prefill_seconds(self.shape, [self.length] * self.count, ceilings)

    def measure(self, session: EngineDriver) -> Figures:
        seconds = _median_seconds(self, session, [self.length] * self.count)
        return {"seconds": seconds, "input_tokens_per_second": self.count * self.length / seconds}


@dataclass(frozen=True)
class FirstToken(TimedPart):
    """TTFT of a request while nothing else runs."""

    @property
    def name(self) -> str:
        return f"TTFT of {self.workload.prompt} tokens alone"

    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        return floors.prefill_seconds(self.shape, [self.workload.prompt], ceilings)

    def measure(self, session: EngineDriver) -> Figures:
        return {"seconds": _median_seconds(self, session, [self.workload.prompt])}


def _median_seconds(part: TimedPart, session: EngineDriver, lengths: list[int]) -> float:
    # New prompts each time, to miss the prefix cache.
    times = [
        session.seconds(prompts(lengths, part.shape.vocab, seed))
        for seed in range(part.workload.repeats + 1)
    ]
    return median(times[1:])  # the first may include compilation
