"""Sends waves of requests to a running ensemble and records arrival times."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from itertools import pairwise

from client import AsyncTridentClient, SamplingOptions
from client.bench.cpu import CpuMeter
from client.bench.errors import BenchError
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave


@dataclass
class Trace:
    """Arrival times of one request's responses, and the number of tokens."""

    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0


async def run_wave(
    client: AsyncTridentClient,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    meter: CpuMeter,
) -> Wave:
    """Stream the completions of `prompts`, all at once and sent in this order.

    Raises:
        TridentClientError: a request failed.
        BenchError: an answer has another number of tokens than requested.
    """
    meter.start()
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_ask(client, prompt, sampling)) for prompt in prompts]
    except ExceptionGroup as errors:  # the others were cancelled; one error is enough
        raise errors.exceptions[0] from None
    cpu_seconds = meter.stop()
    return replace(summary([task.result() for task in tasks], started), cpu_seconds=cpu_seconds)


def summary(traces: Sequence[Trace], started: float) -> Wave:
    """Return the wave for `traces`, without CPU times."""
    return Wave(
        streams=len(traces),
        num_tokens=sum(trace.num_tokens for trace in traces),
        seconds=max(trace.arrivals[-1] for trace in traces) - started,
        cpu_seconds={},
        ttfts=[trace.arrivals[0] - started for trace in traces],
        gaps=[late - early for trace in traces for early, late in pairwise(trace.arrivals)],
        num_responses=sum(len(trace.arrivals) for trace in traces),
    )


async def _ask(client: AsyncTridentClient, prompt: Prompt, sampling: SamplingOptions) -> Trace:
    trace = Trace()
    num_input_tokens = 0
    async with aclosing(client.stream(prompt.text, **sampling)) as chunks:
        async for chunk in chunks:
            if chunk.num_output_tokens:
                trace.arrivals.append(time.perf_counter())
                trace.num_tokens += chunk.num_output_tokens
            num_input_tokens = max(num_input_tokens, chunk.num_input_tokens)
    if num_input_tokens != len(prompt.token_ids) or trace.num_tokens != sampling["max_tokens"]:
        raise BenchError(
            f"a request of {len(prompt.token_ids)} tokens for {sampling['max_tokens']} was counted "
            f"as one of {num_input_tokens} and answered with {trace.num_tokens}"
        )
    return trace
