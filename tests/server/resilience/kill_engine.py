"""A running server when its engine process dies or hangs, or a client is killed."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from engine.launch.server import TritonServer
from tests.server.resilience.chorus import Chorus
from tests.server.resilience.conversation import Answer
from tests.server.resilience.desk import Desk
from tests.server.resilience.observe import not_idle, until
from tests.server.resilience.processes import Tree

ENDED_WITHIN_S = 5.0
SERVING_WITHIN_S = 15.0
HEARTBEAT_TIMEOUT_S = 2.0
SETTINGS: dict[str, Any] = {
    "num_gpu_blocks_override": 1200,
    "heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S,
}
_NUM_CLIENT_STREAMS = 8
_LATEST_S = 1.0


@dataclass
class Round:
    """The result of one kill.

    Attributes:
        errors, complete: number of streams by how they ended.
        recovery_s: seconds until the next request was answered.
    """

    what: str
    errors: int = 0
    complete: int = 0
    recovery_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def count(self, answers: list[Answer | None]) -> None:
        """Count the outcomes of `answers`."""
        outcomes = [answer.outcome for answer in answers if answer is not None]
        self.errors = outcomes.count("error")
        self.complete = outcomes.count("complete")


async def kill_engine(server: TritonServer, chorus: Chorus, rng: random.Random) -> Round:
    """Kill the engine process under load."""
    return await _strike(server, chorus, rng, "engine process: SIGKILL", signal.SIGKILL)


async def stop_engine(server: TritonServer, chorus: Chorus, rng: random.Random) -> Round:
    """Stop the engine process under load, so that it hangs until the watchdog kills it."""
    noticed_s = HEARTBEAT_TIMEOUT_S + 1
    what = "engine process: SIGSTOP"
    return await _strike(server, chorus, rng, what, signal.SIGSTOP, noticed_s)


async def _strike(
    server: TritonServer,
    chorus: Chorus,
    rng: random.Random,
    what: str,
    number: signal.Signals,
    noticed_s: float = 0.0,
) -> Round:
    result = Round(what)
    async with Desk(server) as desk:
        streams = chorus.sing(desk)
        await asyncio.sleep(rng.uniform(0, _LATEST_S))
        begin = time.monotonic()
        _signal_engine(server, number)
        answers = await answers_within(streams, noticed_s + ENDED_WITHIN_S)
        result.count(answers)
        result.problems += chorus.wrong(answers, may_fail=True)
        result.recovery_s = await _recovery(desk, chorus, begin)
        if result.recovery_s > noticed_s + SERVING_WITHIN_S:
            result.problems.append(f"no service after {result.recovery_s:.0f} s")
    result.problems += await not_idle(server)
    return result


async def kill_client(server: TritonServer, chorus: Chorus, rng: random.Random) -> Round:
    """Kill a client with open streams beside others."""
    result = Round("client: SIGKILL")
    command = [sys.executable, "-m", "tests.server.resilience.client_process"]
    client = subprocess.Popen(
        [*command, server.grpc_url, str(_NUM_CLIENT_STREAMS)], stdout=subprocess.PIPE
    )
    assert client.stdout is not None
    with client.stdout:
        try:
            async with Desk(server) as desk:
                assert await asyncio.to_thread(client.stdout.readline) == b"open\n"
                streams = chorus.sing(desk)
                await asyncio.sleep(rng.uniform(0, _LATEST_S))
                client.kill()
                answers: list[Answer | None] = [*await asyncio.gather(*streams)]
        finally:
            client.kill()
            client.wait()
    result.count(answers)
    result.problems += chorus.wrong(answers)
    result.problems += await not_idle(server)
    return result


async def poison(server: TritonServer, chorus: Chorus) -> Round:
    """Crash the engine process twice by one request: the third time the request is refused."""
    result = Round("engine process: SIGSEGV, one request")
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 3000})
    prompt = f"Poison {time.time()}"
    inputs = {"text_input": prompt, "stream": True, "sampling_parameters": sampling}
    async with Desk(server) as desk:
        for _ in range(2):
            conversation = desk.grpc(inputs)
            async for _ in conversation.pieces():
                if len(conversation.answer.pieces) == 1:
                    _signal_engine(server, signal.SIGSEGV)
            if conversation.answer.outcome != "error":
                result.problems.append(f"not lost with the engine: {conversation.answer}")
            result.recovery_s = await _recovery(desk, chorus, time.monotonic())
        third = await desk.grpc(inputs).run()
        if "refused: the engine died" not in third.error:
            result.problems.append(f"not refused: {third}")
        streams = chorus.sing(desk)
        result.problems += chorus.wrong(await asyncio.gather(*streams))
    result.errors = 3
    result.problems += await not_idle(server)
    return result


def _signal_engine(server: TritonServer, number: signal.Signals) -> None:
    process = Tree.of(server.pid).engine_process()
    assert process is not None, "the engine process is not there"
    os.kill(process.pid, number)


async def answers_within(
    streams: list[asyncio.Task[Answer]], seconds: float
) -> list[Answer | None]:
    """Return the answers that end in time; None for the others, which are cancelled."""
    await asyncio.wait(streams, timeout=seconds)
    in_time = [stream.done() for stream in streams]
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    return [s.result() if done else None for s, done in zip(streams, in_time, strict=True)]


async def _recovery(desk: Desk, chorus: Chorus, begin: float) -> float:
    """Return the seconds since `begin` until a request is answered correctly."""

    async def is_answered() -> bool:
        return (await chorus.voice(desk, 0).run()).outcome == "complete"

    served = await until(is_answered, 2 * SERVING_WITHIN_S, 0.1)
    return time.monotonic() - begin if served else math.inf
