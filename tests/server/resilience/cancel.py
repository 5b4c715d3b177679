"""Cancels requests in every way, and shows that the others never notice.

    python -m tests.server.resilience.cancel

First 64 streams, of which a third ends early at random moments; then, one at a time, how long it
takes from each kind of cancellation until the engine has dropped the request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from typing import Any

from client.serve import TritonServer
from tests.server.resilience import cancel_latency, report
from tests.server.resilience.conversation import Answer, Conversation
from tests.server.resilience.desk import Desk
from tests.server.resilience.observe import complaints, health, not_idle
from tests.server.resilience.service import serving
from tests.server.resilience.ways import WAYS, Way

# Fewer sequences at once than streams, so that some are cancelled while they wait, and fewer
# blocks than those want, so that some are cancelled while they are preempted.
SETTINGS: dict[str, Any] = {"max_num_seqs": 40, "num_gpu_blocks_override": 400}


def survivor(index: int, max_tokens: int) -> tuple[str, dict[str, Any]]:
    """Return model and inputs of a request that nobody cancels; every other one is seeded.

    The seeds are such that no draw falls within rounding of the border between two tokens: in a
    batch of another size the last bits of a logit differ, and there a token may.
    """
    model = "engine" if index % 4 == 3 else "ensemble"
    sampling: dict[str, Any] = {"ignore_eos": True, "max_tokens": max_tokens + index % 7}
    sampling |= {"temperature": 0.9, "seed": 1000 + index} if index % 2 else {"temperature": 0.0}
    prompt: dict[str, Any] = {"input_ids": [3 + index, 5, 6]}
    if model == "ensemble":
        prompt = {"text_input": f"Survivor {index}: 你好"}
    return model, {**prompt, "stream": True, "sampling_parameters": json.dumps(sampling)}


def _survive(desk: Desk, index: int, max_tokens: int) -> Conversation:
    model, inputs = survivor(index, max_tokens)
    over_http = index % 8 == 4
    return desk.http(inputs) if over_http else desk.grpc(inputs, model=model)


async def storm(
    server: TritonServer, *, seed: int, streams: int = 64, max_tokens: int = 300
) -> list[str]:
    """Run `streams` at once and end a third early; return what went wrong."""
    rng = random.Random(seed)
    num_victims = streams // 3
    num_survivors = streams - num_victims
    async with Desk(server) as desk:
        alone = [await _survive(desk, i, max_tokens).run() for i in range(num_survivors)]
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(_survive(desk, i, max_tokens).run()) for i in range(num_survivors)
            ]
            victims = [
                group.create_task(_victim(desk, WAYS[i % len(WAYS)], f"victim-{i}", rng))
                for i in range(num_victims)
            ]
    problems = [
        f"survivor {i}: {difference}"
        for i, task in enumerate(tasks)
        if (difference := _difference(task.result(), alone[i]))
    ]
    problems += [problem for victim in victims for problem in victim.result()[1]]
    _show_outcomes(victim.result()[0] for victim in victims)
    return problems + await aftermath(server)


def _difference(together: Answer, alone: Answer) -> str:
    """Say how an answer differs from what the same request was answered alone."""
    if together.outcome != "complete":
        return f"{together.outcome} {together.error}"
    if together.text == alone.text:
        return ""
    pairs = zip(together.text, alone.text, strict=False)
    common = next((i for i, (a, b) in enumerate(pairs) if a != b), "the end")
    return f"differs from character {common} on, of {len(alone.text)}"


async def _victim(
    desk: Desk, way: Way, request_id: str, rng: random.Random
) -> tuple[tuple[str, str], list[str]]:
    """Let one request end early; return (way, outcome) and what went wrong."""
    sampling = json.dumps({"ignore_eos": True, "max_tokens": 1000})
    inputs = {"stream": True, "sampling_parameters": sampling}
    moment = rng.uniform(0.0, 1.5)
    conversation = way.open(desk, inputs, request_id)
    running = asyncio.create_task(conversation.run())
    await asyncio.wait([running], timeout=moment)
    if not running.done():
        await way.end(desk, conversation, request_id)
    answer = await running
    wrong = answer.outcome not in way.ends
    return (way.name, answer.outcome), [f"{way.name}: {answer}"] if wrong else []


def _show_outcomes(victims: Any) -> None:
    rows = [(*key, count) for key, count in sorted(Counter(victims).items())]
    report.show("Requests that ended early", ("way", "outcome", "count"), rows)


async def aftermath(server: TritonServer) -> list[str]:
    """Return what is not as it was before: blocks, gauges, the engine process, the log."""
    problems = await not_idle(server)
    state = health(server)
    if state is None or state["num_restarts"]:
        problems.append(f"the engine process has died: {state}")
    return problems + [f"in the log: {line}" for line in complaints(server.log)]


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
