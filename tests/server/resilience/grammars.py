"""Structured output beside plain streams: is every document valid, and does any stream notice?

    python -m tests.server.resilience.grammars --seconds 60

Five times as long, plain streams run: alone; beside clients that call a tool of sets of 100 KB, of
which each is new to the server; beside clients that send grammars with faults in them; beside
clients whose grammars leave no choice for thousands of tokens; beside clients whose grammars are
ambiguous. The weights are random, and the temperature of all that is structured is 1.5. Each
document that was not cut off is validated; no stream may wait for a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator, ValidationError

from client.aio import AsyncTridentClient
from client.errors import InvalidRequestError
from engine.bench.tool_sets import ToolSets, calls_schema
from engine.launch.server import TritonServer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.resilience import report
from tests.server.resilience.fuzzing.grammars import ambiguous, forcing, mutated
from tests.server.resilience.observe import not_idle
from tests.server.resilience.service import serving

SETTINGS: dict[str, Any] = {"max_num_seqs": 48}
_STREAMS, _CLIENTS = 32, 2
_TOOLS_SIZE = 100_000
_LONGEST_S = 1.0
_TEMPERATURE = 1.5
# Ends strings, arrays and objects sooner than random weights do.
_CLOSING, _BLANK = '"}],:', " \n\r\t"

Make = Callable[[random.Random], dict[str, Any]]


@dataclass
class Answers:
    """What became of structured requests, by outcome, and what should not have."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def call_tools(client: AsyncTridentClient, seed: int, end: float) -> Answers:
    """Ask for calls of one tool set after the other, and validate each."""
    tokenizer = byte_level_tokenizer()
    bias = {tokenizer.encode(each)[0]: 4.0 for each in _CLOSING}
    bias |= {tokenizer.encode(each)[0]: -4.0 for each in _BLANK}
    sets, answers = ToolSets(seed), Answers()
    while time.monotonic() < end:
        schema = calls_schema(sets.tools(_TOOLS_SIZE))
        found = await client.generate(
            "Call a tool.",
            structured_outputs={"json": schema},
            temperature=_TEMPERATURE,
            logit_bias=bias,
            max_tokens=1500,
        )
        if found.finish_reason != "stop":
            answers.outcomes[f"ended with {found.finish_reason}"] += 1
            continue
        try:
            Draft202012Validator(schema).validate(json.loads(found.text))
            answers.outcomes["valid"] += 1
        except (ValueError, ValidationError) as error:
            answers.problems.append(f"{error}: {found.text}")
    return answers


async def send_mutants(client: AsyncTridentClient, seed: int, end: float) -> Answers:
    """Send grammars with faults; each gets an answer, or an error that names a field."""
    return await send(client, mutated, seed, end)


async def send_forcing(client: AsyncTridentClient, seed: int, end: float) -> Answers:
    """Send grammars that leave no choice for long; the same."""
    return await send(client, forcing, seed, end)


async def send_ambiguous(client: AsyncTridentClient, seed: int, end: float) -> Answers:
    """Send grammars whose masks cost more with each token; the same."""
    [z] = byte_level_tokenizer().encode("z", add_special_tokens=False)

    def make(rng: random.Random) -> dict[str, Any]:
        return {**ambiguous(rng), "logit_bias": {z: 20.0}}

    return await send(client, make, seed, end)


async def send(client: AsyncTridentClient, make: Make, seed: int, end: float) -> Answers:
    """Send what `make` returns, one after the other."""
    rng, answers = random.Random(seed), Answers()
    while time.monotonic() < end:
        fields = make(rng)
        try:
            await client.generate("x", temperature=_TEMPERATURE, **fields)
            answers.outcomes["answered"] += 1
        except InvalidRequestError:
            answers.outcomes["refused"] += 1
        except Exception as error:
            answers.problems.append(f"{error!r} for {str(fields)[:2000]}")
    return answers


LOADS = {
    "100 KB of tools": call_tools,
    "faulty grammars": send_mutants,
    "no choice": send_forcing,
    "ambiguous grammars": send_ambiguous,
}


def load(name: str, url: str, seed: int, seconds: float) -> Answers:
    """Keep up one of `LOADS` with several clients. Runs in a process of its own."""

    async def run() -> list[Answers]:
        async with AsyncTridentClient(url) as client:
            end = time.monotonic() + seconds
            asking = (LOADS[name](client, seed + each, end) for each in range(_CLIENTS))
            return await asyncio.gather(*asking)

    total = Answers()
    for answers in asyncio.run(run()):
        total.outcomes += answers.outcomes
        total.problems += answers.problems
    return total


@asynccontextmanager
async def streaming(client: AsyncTridentClient, gaps: list[float]) -> AsyncIterator[None]:
    """Keep plain streams running; append the seconds between their chunks to `gaps`."""

    async def repeat(index: int) -> None:
        while True:
            last = None
            async for _ in client.stream(f"Stream {index}", max_tokens=1000, ignore_eos=True):
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now

    tasks = [asyncio.create_task(repeat(index)) for index in range(_STREAMS)]
    try:
        yield
    finally:
        failed = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert not failed, failed


async def measure(
    server: TritonServer, seconds: float, seed: int = 0, longest_s: float = _LONGEST_S
) -> list[str]:
    """Print what the streams saw of each load; return the problems."""
    rows: list[tuple[object, ...]] = []
    problems: list[str] = []
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        async with AsyncTridentClient(server.grpc_url) as client:
            for name in ("", *LOADS):
                gaps: list[float] = []
                async with streaming(client, gaps):
                    await asyncio.sleep(1.0)  # until all run
                    gaps.clear()
                    answers = Answers()
                    if name:
                        asked = (name, server.grpc_url, seed, seconds)
                        loop = asyncio.get_running_loop()
                        answers = await loop.run_in_executor(pool, load, *asked)
                    else:
                        await asyncio.sleep(seconds)
                p50, p99 = np.percentile(gaps, [50, 99])
                figures = (1e3 * float(each) for each in (p50, p99, max(gaps)))
                outcomes = (f"{count} {what}" for what, count in answers.outcomes.items())
                rows.append((name or "alone", len(gaps), *figures, ", ".join(outcomes)))
                problems += answers.problems
                if max(gaps) > longest_s:
                    problems.append(f"{name or 'alone'}: a stream waited for {max(gaps):.2f} s")
                if name and not answers.outcomes:
                    problems.append(f"{name}: no answer")
            health = await client.health()
    if health.num_restarts:
        problems.append(f"the engine was restarted {health.num_restarts} times")
    columns = ("beside", "gaps", "p50, ms", "p99, ms", "longest, ms", "answers")
    report.show(f"{_STREAMS} plain streams, time between chunks", columns, rows)
    return [*problems, *await not_idle(server)]


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (default: 60)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with serving(**SETTINGS) as server:
        problems = asyncio.run(measure(server, arguments.seconds, arguments.seed))
    return report.verdict(problems)


if __name__ == "__main__":
    sys.exit(main())
