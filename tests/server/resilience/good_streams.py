"""Streams that must not be affected by other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.server.resilience.desk import Desk
from tests.server.resilience.gate import Gate

_INPUTS = {"stream": True, "sampling_parameters": json.dumps({"ignore_eos": True})}


class GoodStreams:
    """Repeats the same requests, greedy and seeded, and compares the texts.

    Attributes:
        completed: full answers received beside other requests.
        problems: answers that differ from those of the same request alone.
    """

    def __init__(self, desk: Desk, count: int, gate: Gate, *, max_tokens: int = 100) -> None:
        self._desk = desk
        self._gate = gate
        self._asks = [
            {
                **_INPUTS,
                "text_input": f"Good stream {i}: 你好",
                "max_tokens": max_tokens + 7 * i,
                **({"temperature": 0.8, "seed": i} if i % 2 else {"temperature": 0.0}),
            }
            for i in range(count)
        ]
        self._alone: list[str] = []
        self.completed = 0
        self.problems: list[str] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run each request alone first; then all of them in rounds, controlled by the gate.

        The gate ends with the block.
        """
        for ask in self._asks:
            answer = await self._desk.grpc(ask).run()
            assert answer.outcome == "complete", answer
            self._alone.append(answer.text)
        tasks = [asyncio.create_task(self._repeat(i)) for i in range(len(self._asks))]
        try:
            yield
        finally:
            self._gate.end()
            await asyncio.gather(*tasks)

    async def _repeat(self, index: int) -> None:
        while not self._gate.ended:
            async with self._gate.round():
                answer = await self._desk.grpc(self._asks[index]).run()
            if answer.outcome != "complete" or answer.text != self._alone[index]:
                self.problems.append(
                    f"good stream {index}: {answer.outcome} {answer.error} after "
                    f"{len(answer.text)} of {len(self._alone[index])} characters"
                )
                return
            self.completed += 1
