"""Endless requests of every kind: answered in full, ended early, and malformed."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.server.resilience.conversation import Conversation
from tests.server.resilience.desk import Desk
from tests.server.resilience.fuzz import make
from tests.server.resilience.fuzzing.judge import GOOD, Judge
from tests.server.resilience.fuzzing.wire import Wire
from tests.server.resilience.gate import Gate
from tests.server.resilience.ways import WAYS

_LONGEST_PROMPT = 1500  # characters
_LONGEST_ANSWER = 400  # tokens
_LATEST_END_S = 1.5
_SHARE_ENDED_EARLY = 0.25
_SHARE_MALFORMED = 0.1
_EXAMPLES = 20


class Load:
    """Workers that send one request after another, controlled by a gate.

    Attributes:
        outcomes: results of the requests so far, by kind.
        problems: unexpected results, the first ones of them.
    """

    def __init__(self, desk: Desk, wire: Wire, gate: Gate, *, seed: int) -> None:
        self._desk = desk
        self._wire = wire
        self._judge = Judge([])
        self._seed = seed
        self._rng = random.Random(seed)
        self._gate = gate
        self._count = 0
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    @asynccontextmanager
    async def running(self, workers: int) -> AsyncIterator[None]:
        """Run `workers` workers in the block; the gate ends with it."""
        tasks = [asyncio.create_task(self._work()) for _ in range(workers)]
        try:
            yield
        finally:
            self._gate.end()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self.problems += [f"a worker ended: {error!r}" for error in ended if error is not None]

    async def _work(self) -> None:
        while not self._gate.ended:
            async with self._gate.round():
                self._count += 1
                await self._one(self._count)

    async def _one(self, number: int) -> None:
        choice = self._rng.random()
        if choice < _SHARE_MALFORMED:
            await self._malformed(number)
        elif choice < _SHARE_MALFORMED + _SHARE_ENDED_EARLY:
            await self._ended_early(number)
        else:
            conversation = self._conversation()
            answer = await conversation.run()
            self._record("request", answer.outcome, answer.outcome == "complete", answer.error)

    async def _malformed(self, number: int) -> None:
        case = make(self._seed, number)
        reply = await self._wire.send(case, number)
        outcome = self._judge(case, reply)
        self._record("malformed", outcome, outcome in GOOD, f"{case.kind} ({number}): {reply.text}")

    async def _ended_early(self, number: int) -> None:
        way = self._rng.choice(WAYS)
        request_id = f"soak-{number}"
        inputs = {"stream": self._rng.random() < 0.8, "sampling_parameters": self._sampling()}
        conversation = way.open(self._desk, inputs, request_id)
        running = asyncio.create_task(conversation.run())
        await asyncio.wait([running], timeout=self._rng.uniform(0, _LATEST_END_S))
        if not running.done():
            await way.end(self._desk, conversation, request_id)
        answer = await running
        self._record(way.name, answer.outcome, answer.outcome in way.ends, answer.error)

    def _conversation(self) -> Conversation:
        prompt: dict[str, Any] = {"stream": self._rng.random() < 0.8}
        prompt["sampling_parameters"] = self._sampling()
        length = self._rng.randint(1, _LONGEST_PROMPT)
        if self._rng.random() < 0.2:
            ids = [self._rng.randrange(3, 300) for _ in range(length)]
            return self._desk.grpc({**prompt, "input_ids": ids}, model="engine")
        text = f"{self._rng.random()} {'Some words. 你好 ' * 200}"[:length]
        if not prompt["stream"] and self._rng.random() < 0.5:
            return self._desk.grpc({**prompt, "text_input": text}, model="tensorrt_llm_bls")
        send = self._desk.http if self._rng.random() < 0.3 else self._desk.grpc
        return send({**prompt, "text_input": text})

    def _sampling(self) -> str:
        rng = self._rng
        fields: dict[str, Any] = {"max_tokens": rng.randint(1, _LONGEST_ANSWER)}
        chosen = {
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "top_p": 0.9,
            "top_k": rng.choice([0, 20]),
            "seed": rng.randrange(1000),
            "stop": ["zq", "你"],
            "logprobs": 2,
            "n": 2,
            "ignore_eos": True,
            "repetition_penalty": 1.1,
        }
        names = rng.sample(sorted(chosen), rng.randint(0, 4))
        return json.dumps({**fields, **{name: chosen[name] for name in names}})

    def _record(self, kind: str, outcome: str, is_right: bool, text: str) -> None:
        self.outcomes[f"{kind}: {outcome}"] += 1
        if not is_right and len(self.problems) < _EXAMPLES:
            self.problems.append(f"{kind}: {outcome}: {text[:300]}")
