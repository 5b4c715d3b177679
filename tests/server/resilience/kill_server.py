"""Nothing is left, within seconds, when a process of the server is killed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from tests.server.resilience.chorus import Chorus
from tests.server.resilience.desk import Desk
from tests.server.resilience.kill_engine import Round, answers_within
from tests.server.resilience.launched import Running, launched, plain
from tests.server.resilience.observe import until

GONE_WITHIN_S = 15.0  # streams have 5 s, and what hangs is killed 5 s later
_LATEST_S = 1.0

Start = Callable[[Path], AbstractContextManager[Running]]

# What is started, and which of its processes is killed: what `restart` kills comes back.
TARGETS: tuple[tuple[str, Start, str], ...] = (
    ("trident serve", launched, "launcher"),
    ("tritonserver", plain, "tritonserver"),
)


def kill_server(
    model: Path, chorus: Chorus, rng: random.Random, name: str, start: Start, role: str
) -> Round:
    """Start a server, kill the process with `role` under load, and report what is left of it."""
    result = Round(f"{name}: {role}: SIGKILL")
    with start(model) as running:
        asyncio.run(_under_load(running, chorus, rng, role, result))
    return result


async def _under_load(
    running: Running, chorus: Chorus, rng: random.Random, role: str, result: Round
) -> None:
    async with Desk(running) as desk:
        streams = chorus.sing(desk)
        await asyncio.sleep(rng.uniform(0.1, _LATEST_S))
        footprint = running.footprint()
        begin = time.monotonic()
        _victim(running, role).kill()

        async def all_gone() -> bool:
            return not await asyncio.to_thread(footprint.remains)

        await until(all_gone, GONE_WITHIN_S, 0.1)
        result.recovery_s = time.monotonic() - begin
        result.problems += [f"left: {each}" for each in footprint.remains()]
        answers = await answers_within(streams, 1.0)
        result.count(answers)
        result.problems += chorus.wrong(answers, may_fail=True)


def _victim(running: Running, role: str) -> psutil.Process:
    return running.top if role == "launcher" else running.tree.members()[role]
