"""Concurrent streams, each of which must give its expected text or an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from tests.server.resilience.conversation import Answer, Conversation
from tests.server.resilience.desk import Desk


class Chorus:
    """Streams to the ensemble and to the engine, over gRPC and HTTP, greedy and seeded.

    Seeds are chosen such that no draw is within rounding of the boundary between two tokens: logits
    differ in the last bits between batch sizes, which could change such a draw.
    """

    def __init__(self, count: int, max_tokens: int) -> None:
        self._count = count
        self._max_tokens = max_tokens
        self._alone: list[str] = []

    async def learn(self, desk: Desk) -> None:
        """Run each stream alone; its text is the expected one."""
        for index in range(self._count):
            answer = await self.voice(desk, index).run()
            assert answer.outcome == "complete", answer
            self._alone.append(answer.text)

    def voice(self, desk: Desk, index: int) -> Conversation:
        """Return one stream, not sent yet."""
        sampling: dict[str, Any] = {"ignore_eos": True, "max_tokens": self._max_tokens + index % 7}
        sampling |= {"temperature": 0.9, "seed": 1000 + index} if index % 2 else {"temperature": 0}
        inputs = {"stream": True, "sampling_parameters": json.dumps(sampling)}
        if index % 4 == 3:
            return desk.grpc({**inputs, "input_ids": [3 + index, 5, 6]}, model="engine")
        text = {**inputs, "text_input": f"Voice {index}: 你好"}
        return desk.http(text) if index % 8 == 4 else desk.grpc(text)

    def sing(self, desk: Desk) -> list[asyncio.Task[Answer]]:
        """Start all streams."""
        return [asyncio.create_task(self.voice(desk, i).run()) for i in range(self._count)]

    def wrong(self, answers: Sequence[Answer | None], *, may_fail: bool = False) -> list[str]:
        """Return the problems with the answers; None is one that did not end.

        Args:
            may_fail: errors are accepted too; a truncated text that looks complete never is.
        """
        return [
            f"stream {index}: {reason}"
            for index, answer in enumerate(answers)
            if (reason := self._wrong(answer, self._alone[index], may_fail))
        ]

    @staticmethod
    def _wrong(answer: Answer | None, alone: str, may_fail: bool) -> str:
        if answer is None:
            return "has not ended"
        if answer.outcome == "error" and may_fail:
            return ""
        if answer.outcome != "complete":
            return f"{answer.outcome} {answer.error}"
        if answer.text == alone:
            return ""
        pairs = zip(answer.text, alone, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
        return f"differs from character {common} on, of {len(alone)}"
