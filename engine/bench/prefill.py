"""A prefill step, and a single request: the time to its first token."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from engine.bench import floors
from engine.bench.driver import EngineDriver
from engine.bench.floors import Ceilings
from engine.bench.part import Figures, Part
from engine.bench.workload import prompts
from kernels.bench.case import Aim


@dataclass(frozen=True)
class Prefill(Part):
    """The seconds to compute `count` prompts in one step, from their arrival to their tokens."""

    count: int

    @property
    def length(self) -> int:
        """Tokens of each prompt."""
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
class FirstToken(Part):
    """The seconds from a request's arrival to its first token while nothing else runs."""

    @property
    def name(self) -> str:
        return f"TTFT of {self.workload.prompt} tokens alone"

    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        return floors.prefill_seconds(self.shape, [self.workload.prompt], ceilings)

    def measure(self, session: EngineDriver) -> Figures:
        return {"seconds": _median_seconds(self, session, [self.workload.prompt])}


def _median_seconds(part: Part, session: EngineDriver, lengths: list[int]) -> float:
    # New prompts every time: the prefix cache would know the old ones.
    times = [
        session.seconds(prompts(lengths, part.shape.vocab, seed))
        for seed in range(part.workload.repeats + 1)
    ]
    return median(times[1:])  # the first may have had something to compile
