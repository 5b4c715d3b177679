"""Latency from a cancellation until the engine has dropped the request and freed its blocks.

The engine process logs the drop with millisecond timestamps, on the same machine and clock. A
timeout ends with an answer: there the latency is from the deadline until the client has the answer,
which is later than the release of the blocks.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from engine.launch.server import TritonServer
from tests.server.resilience import report
from tests.server.resilience.conversation import Conversation
from tests.server.resilience.desk import Desk
from tests.server.resilience.observe import health, until
from tests.server.resilience.service import MAX_MODEL_LEN
from tests.server.resilience.ways import PROMPT, WAYS, Leaving, Timeout, Way

SETTINGS: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 2000}
LIMIT_S = 0.1
GIVE_UP_S = 1.5
_MORE_S = 1.5  # from giving up until the request's own timeout ends it
_DROPPED = re.compile(r"^(\S+ \S+)\.(\d{3}) INFO trident\.engine: request aborted ", re.M)
_LONG = json.dumps({"ignore_eos": True, "max_tokens": MAX_MODEL_LEN - 20})


@dataclass(frozen=True)
class State:
    """State of a request when it is cancelled."""

    waiting: bool
    streamed: bool

    def __str__(self) -> str:
        return f"{'waiting' if self.waiting else 'running'}{'' if self.streamed else ', unary'}"


STATES = [State(w, s) for s in (True, False) for w in (False, True)]


@dataclass
class Result:
    """Seconds by way and state; infinite if nothing happened before giving up."""

    seconds: dict[tuple[Way, State], list[float]] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Latencies above the limit, where a cancellation can be noticed in time."""
        return [
            f"{way.name}, {state}: {_ms(median(values))} ms"
            for (way, state), values in self.seconds.items()
            if median(values) > LIMIT_S and not gap(way, state)
        ]

    def show(self) -> None:
        """Print the table."""
        rows = []
        for (way, state), values in self.seconds.items():
            figures = (_ms(median(values)), _ms(max(values)), gap(way, state))
            rows.append((way.name, state, len(values), *figures))
        columns = ("way", "state", "times", "median ms", "max ms", "")
        report.show("From the cancellation until the blocks are free", columns, rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if math.isfinite(seconds) else "never"


def gap(way: Way, state: State) -> str:
    """Return why a lost client cannot be noticed in this state; empty if it can be."""
    if not isinstance(way, Leaving) or state == State(waiting=False, streamed=True):
        return ""
    if way.over_http:
        return "Triton does not look before it sends"
    # Triton notifies the step that executes the request, which waits for the engine's answer.
    return "no step is told before the first token" if way.model == "ensemble" else ""


async def measure(
    server: TritonServer, *, rounds: int, gaps: bool = True, give_up_s: float = GIVE_UP_S
) -> Result:
    """Cancel `rounds` requests of each kind, one at a time, beside running requests.

    Args:
        gaps: also try once what cannot be noticed.
        give_up_s: when a cancellation counts as not noticed.
    """
    result = Result()
    async with Desk(server) as desk:
        for state in STATES:
            async with _occupied(desk, _others(server, state)):
                for way in WAYS:
                    times = int(gaps) if gap(way, state) else rounds
                    if not times:
                        continue
                    result.seconds[way, state] = [
                        await _once(server, desk, way, state, f"victim-{i}", give_up_s)
                        for i in range(times)
                    ]
    return result


def _others(server: TritonServer, state: State) -> int:
    """Return how many requests put one more into `state`.

    As many as run wait before one that shall wait: some of those that run end meanwhile.
    """
    limit = server.config.max_num_seqs
    return 2 * limit if state.waiting else limit - 1


@asynccontextmanager
async def _occupied(desk: Desk, count: int) -> AsyncIterator[None]:
    """Keep `count` requests at the engine in the block."""
    inputs = {**PROMPT["engine"], "stream": True, "sampling_parameters": _LONG}
    tasks = [asyncio.create_task(_again_and_again(desk, inputs)) for _ in range(count)]
    await asyncio.sleep(0.2)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _again_and_again(desk: Desk, inputs: dict[str, object]) -> None:
    while True:
        answer = await desk.grpc(inputs, model="engine").run()
        assert answer.outcome == "complete", answer


async def _once(
    server: TritonServer, desk: Desk, way: Way, state: State, request_id: str, give_up_s: float
) -> float:
    """Return the latency of one cancellation in seconds."""
    inputs: dict[str, object] = {"stream": state.streamed, "sampling_parameters": _LONG}
    timeout_s = give_up_s + _MORE_S
    if not isinstance(way, Timeout):
        inputs["timeout"] = round(timeout_s * 1e6)
    await _others_alone(server, state)
    conversation = way.open(desk, inputs, request_id)
    started = time.time()
    running = asyncio.create_task(conversation.run())
    if isinstance(way, Timeout):
        await running
        assert conversation.answer.outcome == "abort", conversation.answer
        return time.time() - started - way.seconds
    await _established(server, conversation, state)
    log_length = len(server.log)
    begin = time.time()
    await way.end(desk, conversation, request_id)
    seconds = await _dropped(server, log_length, give_up_s) - begin
    await running
    if not math.isfinite(seconds):  # so that it does not run beside the next ones
        await asyncio.sleep(timeout_s - (time.time() - started) + 0.1)
    return seconds


async def _others_alone(server: TritonServer, state: State) -> None:
    """Wait until the request before, if any, has left the engine."""
    others = _others(server, state)

    async def nobody_else() -> bool:
        return await _num_in_flight(server) <= others

    assert await until(nobody_else, 10)


async def _established(server: TritonServer, conversation: Conversation, state: State) -> None:
    """Wait until the request is in `state`, beside those that occupy the server."""
    others = _others(server, state)

    async def pieces_have_come() -> bool:
        return len(conversation.answer.pieces) >= 3

    async def engine_has_it() -> bool:
        return await _num_in_flight(server) > others

    if state.streamed and not state.waiting:
        assert await until(pieces_have_come, 10), conversation.answer
    else:
        assert await until(engine_has_it, 10)
        assert not conversation.answer.pieces


async def _num_in_flight(server: TritonServer) -> float:
    """Return how many requests the engine has now; the gauges are up to half a second old."""
    answer = await asyncio.to_thread(health, server)
    return answer["num_in_flight"] if answer else math.nan


async def _dropped(server: TritonServer, log_length: int, give_up_s: float) -> float:
    """Return the wall-clock time when the engine dropped the next request; inf if it did not."""
    found: list[re.Match[str]] = []

    async def says_so() -> bool:
        found.extend(_DROPPED.finditer(server.log, log_length))
        return bool(found)

    if not await until(says_so, give_up_s, 0.01):
        return math.inf
    seconds = time.mktime(time.strptime(found[0][1], "%Y-%m-%d %H:%M:%S"))
    return seconds + int(found[0][2]) / 1000
