"""The offline workload: all requests at once, with lengths that vary by a factor of ten."""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine.bench import floors
from engine.bench.driver import EngineDriver
from engine.bench.floors import Ceilings
from engine.bench.part import Figures, TimedPart
from engine.protocol import SequenceOutput


@dataclass(frozen=True)
class Offline(TimedPart):
    """The seconds to complete the first `count` requests of the workload.

    Attributes:
        temperature: nano-vllm's benchmark samples with 0.6; transformers runs greedily.
    """

    count: int
    temperature: float

    @property
    def name(self) -> str:
        return f"offline, {self.count} sequences"

    def floor(self, figures: Figures, ceilings: Ceilings) -> float:
        requests = self.workload.offline()[: self.count]
        lengths = [(len(prompt), max_tokens) for prompt, max_tokens in requests]
        return floors.offline_seconds(self.shape, lengths, ceilings)

    def requests(self) -> list[tuple[list[int], int]]:
        """Return prompt and number of output tokens of every request."""
        return [
            ([token_id % self.shape.vocab for token_id in prompt], max_tokens)
            for prompt, max_tokens in self.workload.offline()[: self.count]
        ]

    def measure(self, session: EngineDriver) -> Figures:
        requests = self.requests()
        num_tokens = 0

        def count(output: SequenceOutput) -> None:
            nonlocal num_tokens
            num_tokens += len(output.token_ids)

        start = time.perf_counter()
        for prompt, max_tokens in requests:
            session.add(prompt, max_tokens, temperature=self.temperature, stream=False)
        session.run(count)
        session.synchronize()
        seconds = time.perf_counter() - start
        assert num_tokens == sum(max_tokens for _, max_tokens in requests)
        return {"seconds": seconds, "tokens_per_second": num_tokens / seconds}
