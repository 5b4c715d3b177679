"""Streams that must not notice what happens beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.server.resilience.desk import Desk
from tests.server.resilience.gate import Gate

_INPUTS = {"stream": True, "sampling_parameters": json.dumps({"ignore_eos": True})}


class GoodStreams:
    """Asks the same questions again and again, greedily and with seeds, and compares the texts.

    Attributes:
        completed: answers received in full while others ran.
        problems: answers that differ from what the same request gave when it ran alone.
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
        """Ask each alone first; then all go round and round, as the gate lets them.

        The end of the block ends the gate.
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
