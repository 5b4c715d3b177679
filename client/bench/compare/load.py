"""The load generator, the same for every server."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from client.bench.compare.answer import Answer
from client.bench.compare.measurement import Measurement, measurement
from client.bench.compare.memory import tree_memory
from client.bench.compare.server import Connection, Server
from client.bench.compare.workload import Workload
from client.bench.cpu import CpuMeter
from client.bench.errors import BenchError
from client.bench.workload import Prompt, PromptSource

_ATTEMPTS = 3  # to get a run without disturbance by other programs
_ANSWER_TIMEOUT_S = 3600.0  # no answer takes this long: the server hangs
# Warm-up requests before a run, so that one-time work of the server is not measured.
_WARM_UP_REQUESTS = 2
_WARM_UP_TOKENS = 4


async def first_token(server: Server, prompt: Prompt) -> float:
    """Return the seconds from the launch of `server` to its first token.

    Raises:
        TridentClientError: the server does not start, or does not answer.
    """
    await server.wait_until_ready()
    async with server.connect() as connection:
        answer = await _ask(connection, prompt, 1)
    return answer.arrivals[0] - server.launched


async def run_workload(
    server: Server, workload: Workload, source: PromptSource, seed: str
) -> Measurement:
    """Measure a workload, repeating a disturbed run a few times.

    Args:
        source: draws prompts of the workload's length.
        seed: of the prompts; equal seeds give equal prompts.

    Raises:
        TridentClientError: a request failed, or its answer has another length.
    """
    best: Measurement | None = None
    for attempt in range(_ATTEMPTS):
        one = await _run_once(server, workload, source, f"{seed}/{attempt}")
        if best is None or one.others < best.others:
            best = one
        best = replace(best, attempts=attempt + 1)
        if not best.is_disturbed:
            break
    assert best is not None
    return best


async def _run_once(
    server: Server, workload: Workload, source: PromptSource, seed: str
) -> Measurement:
    # New prompts each time, to miss the prefix cache.
    warm_up = source.draw(f"{seed}/warm-up", min(_WARM_UP_REQUESTS, workload.streams))
    prompts = source.draw(seed, workload.requests, shared=workload.shared_tokens)
    meter = CpuMeter(server.pid)
    async with AsyncExitStack() as stack:
        connections = [
            await stack.enter_async_context(server.connect()) for _ in range(workload.streams)
        ]
        await _ask_all(connections, warm_up, min(_WARM_UP_TOKENS, workload.output_tokens))
        started = time.perf_counter()
        meter.start()
        answers = await _ask_all(connections, prompts, workload.output_tokens)
        cpu_seconds = meter.stop()
        seconds = time.perf_counter() - started
    return measurement(
        answers,
        cpu_seconds=cpu_seconds,
        core_seconds=seconds * len(os.sched_getaffinity(0)),
        memory=tree_memory(server.pid),
    )


async def _ask_all(
    connections: Sequence[Connection], prompts: Sequence[Prompt], output_tokens: int
) -> list[Answer]:
    """Send `prompts` in this order, each over the next free connection."""
    waiting = iter(prompts)
    answers: list[Answer] = []

    async def stream(connection: Connection) -> None:
        answers.extend([await _ask(connection, prompt, output_tokens) for prompt in waiting])

    try:
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(stream(connection))
    except ExceptionGroup as errors:  # the others were cancelled; one error is enough
        raise errors.exceptions[0] from None
    return answers


async def _ask(connection: Connection, prompt: Prompt, output_tokens: int) -> Answer:
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            answer = await connection.ask(prompt, output_tokens)
    except TimeoutError:
        raise BenchError(f"the server has not answered in {_ANSWER_TIMEOUT_S:g} s") from None
    if reason := answer.why_unusable(len(prompt.token_ids), output_tokens):
        raise BenchError(f"the server {reason}")
    return answer
