"""Runs a workload on a server that is up."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace

from client.bench.errors import BenchError
from client.bench.load.generators import Generators
from client.bench.load.plan import Plan, Session, draw
from client.bench.load.prompts import PromptSource
from client.bench.load.scrape import Scraper
from client.bench.load.worker import ask_all
from client.bench.load.workload import Workload
from client.bench.measure.cpu import OTHERS, CpuMeter, tree_memory
from client.bench.measure.measurement import Measurement, measurement
from client.bench.servers.server import Running

_ATTEMPTS = 3  # to get a run without disturbance by other programs
_WARM_UP_REQUESTS = 2  # so that one-time work of the server is not measured
_POLL_S = 0.1


def first_token(server: Running, source: PromptSource, seed: str) -> float:
    """Return the seconds from the launch of `server` to its first token.

    Raises:
        TridentClientError: the server does not answer.
    """
    plan = Plan([Session(0, [source.turn(seed, 16, 1)], 0.0)])
    if server.worker is None:
        (record,) = asyncio.run(ask_all(server.target, plan)).records
    else:
        with Generators(server.target, plan, worker=server.worker) as one:
            (record,) = one.run().records
    if record.error:
        server.require_alive()
        raise BenchError(f"the server {record.error}")
    return record.arrivals[0][0] - server.launched


def run_workload(
    server: Running, workload: Workload, source: PromptSource, seed: str, *, processes: int = 0
) -> Measurement:
    """Measure a workload, repeating a disturbed run a few times.

    Args:
        seed: of the prompts; equal seeds give equal prompts.
        processes: of the load generator; 0: as many as it needs.

    Raises:
        TridentClientError: the server fails.
    """
    best: Measurement | None = None
    for attempt in range(_ATTEMPTS):
        one = _run_once(server, workload, source, f"{seed}/{attempt}", processes)
        if best is None or one.others < best.others:
            best = one
        best = replace(best, attempts=attempt + 1)
        if not best.is_disturbed or workload.duration is not None:
            break
    assert best is not None
    return best


def _run_once(
    server: Running, workload: Workload, source: PromptSource, seed: str, processes: int
) -> Measurement:
    # New prompts each time, to miss the prefix cache.
    plan = draw(workload, source, seed)
    users = len(plan.sessions) if plan.concurrency is None else plan.concurrency
    first = plan.sessions[0].turns[0]
    warm_up = [
        source.turn(f"{seed}/warm-up/{number}", len(first.token_ids), first.output_tokens)
        for number in range(min(_WARM_UP_REQUESTS, users))
    ]
    try:
        with (
            Generators(
                *(server.target, plan),
                warm_up=warm_up,
                processes=processes,
                worker=server.worker,
            ) as generators,
            Scraper(server.metrics_url) as scraper,
        ):
            meter = CpuMeter(*server.pids, clients=[*generators.pids, os.getpid()])
            began = time.monotonic()
            ran = generators.run()
            cpu_seconds = meter.used()
            if not server.pids:  # it may be among the other programs, or on another machine
                cpu_seconds[OTHERS] = 0.0
            seconds = time.monotonic() - began
    except BenchError:
        time.sleep(_POLL_S)  # a process ends shortly after its connections
        server.require_alive()  # its exit is the better error
        raise
    found = measurement(
        ran,
        cpu_seconds=cpu_seconds,
        core_seconds=seconds * len(os.sched_getaffinity(0)),
        memory=sum(tree_memory(pid) for pid in server.pids),
        metrics=ran.metrics or scraper.taken,
    )
    if not found.requests:
        server.require_alive()
        raise BenchError(f"the server {found.error or 'answers nothing'}")
    return found
