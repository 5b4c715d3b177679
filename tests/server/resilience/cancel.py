"""Cancels requests in every way, and checks that other requests are not affected.

    python -m tests.server.resilience.cancel

First 64 streams, a third of which end early at random moments; then, one at a time, the latency
from each kind of cancellation until the engine has dropped the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

from engine.launch.server import TritonServer
from tests.server.resilience import cancel_latency, report
from tests.server.resilience.chorus import Chorus
from tests.server.resilience.conversation import Answer
from tests.server.resilience.desk import Desk
from tests.server.resilience.observe import complaints, health, not_idle
from tests.server.resilience.service import serving
from tests.server.resilience.ways import WAYS, Way

# Fewer sequences than streams, so that some are cancelled while waiting, and fewer blocks than they
# need, so that some are cancelled while preempted.
SETTINGS: dict[str, Any] = {"max_num_seqs": 40, "num_gpu_blocks_override": 400}


async def storm(
    server: TritonServer, *, seed: int, streams: int = 64, max_tokens: int = 300
) -> list[str]:
    """Run `streams` concurrently and end a third early; return the problems found."""
    rng = random.Random(seed)
    num_victims = streams // 3
    chorus = Chorus(streams - num_victims, max_tokens)
    log_length = len(server.log)
    async with Desk(server) as desk:
        await chorus.learn(desk)
        survivors = chorus.sing(desk)
        ways = [WAYS[i % len(WAYS)] for i in range(num_victims)]
        ended = await asyncio.gather(
            *(_victim(desk, way, f"victim-{i}", rng) for i, way in enumerate(ways))
        )
        answers = await asyncio.gather(*survivors)
    _show_outcomes([(way.name, answer.outcome) for way, answer in zip(ways, ended, strict=True)])
    problems = chorus.wrong(answers)
    for way, answer in zip(ways, ended, strict=True):
        if answer.outcome not in way.ends:
            problems.append(f"{way.name}: {answer}")
    return problems + await aftermath(server, log_length)


async def _victim(desk: Desk, way: Way, request_id: str, rng: random.Random) -> Answer:
    """Send a request and end it early, at a random moment."""
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 1000})
    inputs = {"stream": True, "sampling_parameters": sampling}
    moment = rng.uniform(0.0, 1.5)
    conversation = way.open(desk, inputs, request_id)
    running = asyncio.create_task(conversation.run())
    await asyncio.wait([running], timeout=moment)
    if not running.done():
        await way.end(desk, conversation, request_id)
    return await running


def _show_outcomes(victims: Iterable[tuple[str, str]]) -> None:
    rows = [(*key, count) for key, count in sorted(Counter(victims).items())]
    report.show("Requests that ended early", ("way", "outcome", "count"), rows)


async def aftermath(server: TritonServer, log_length: int) -> list[str]:
    """Return what has not returned to its idle state: blocks, gauges, engine process, log.

    Args:
        log_length: of the server's log before it was given work: others have used it, too.
    """
    problems = await not_idle(server)
    state = health(server)
    if state is None or state["num_restarts"]:
        problems.append(f"the engine process has died: {state}")
    return problems + [f"in the log: {line}" for line in complaints(server.log[log_length:])]


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10, help="of cancellations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with serving(**SETTINGS) as server:
        problems = asyncio.run(storm(server, seed=arguments.seed, streams=arguments.streams))
    with serving(**cancel_latency.SETTINGS) as server:
        result = asyncio.run(cancel_latency.measure(server, rounds=arguments.rounds))
    result.show()
    return report.verdict([*problems, *result.problems])


if __name__ == "__main__":
    sys.exit(main())
