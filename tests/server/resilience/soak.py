"""Keeps a server at full load, and checks for leaks.

    python -m tests.server.resilience.soak --minutes 20 --csv soak.csv

Requests of random length and sampling, over gRPC, HTTP and to the engine; a quarter is ended early
in one of the ways, a tenth is malformed. Once a minute all requests are drained, and all blocks
must be free. A series is flat if a straight line through it, after half of the time as warm-up,
rises by no more than `trend.allowed_growth`; `trend.Trend` defines the line.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.launch.server import TritonServer
from tests.server.release import released_all
from tests.server.resilience import report
from tests.server.resilience.cancel import aftermath
from tests.server.resilience.desk import Desk
from tests.server.resilience.fuzzing.wire import Wire
from tests.server.resilience.gate import Gate
from tests.server.resilience.good_streams import GoodStreams
from tests.server.resilience.load import Load
from tests.server.resilience.observe import not_idle
from tests.server.resilience.processes import Tree
from tests.server.resilience.samples import SamplerOutput
from tests.server.resilience.service import serving
from tests.server.resilience.trend import MIB, Trend

SETTINGS: dict[str, Any] = {"max_num_seqs": 64, "num_gpu_blocks_override": 1200}
_WORKERS = 72  # more than can run at once, so that some always wait
_GOOD_STREAMS = 4
_BETWEEN_SAMPLES_S = 5.0
_BETWEEN_PAUSES_S = 60.0
_WARM_UP = 0.5  # share of the time


@dataclass
class Result:
    """What was sent, what grew, and problems."""

    outcomes: Counter[str] = field(default_factory=Counter)
    trends: list[tuple[str, str, Trend]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def leaks(self) -> list[str]:
        """The series that are not flat."""
        return [
            f"{role}: {measure} grows by {trend.per_hour:,.0f} per hour"
            for role, measure, trend in self.trends
            if not trend.is_flat
        ]

    def show(self) -> None:
        """Print the tables."""
        report.show("Requests", ("kind: outcome", "count"), sorted(self.outcomes.items()))
        columns = ("process", "measure", "start", "middle", "end", "per hour", "verdict")
        rows = [_row(*each) for each in self.trends]
        report.show("After the warm-up (sizes in MiB)", columns, rows)


def _row(role: str, measure: str, trend: Trend) -> tuple[object, ...]:
    scale = 1 if measure in ("descriptors", "threads") else MIB
    figures = (trend.start, trend.middle, trend.end, trend.per_hour)
    return role, measure, *(f / scale for f in figures), _verdict(trend)


def _verdict(trend: Trend) -> str:
    if math.isinf(trend.allowed):
        return "not judged"
    return "flat" if trend.is_flat else "GROWS"


async def soak(
    server: TritonServer,
    *,
    seconds: float,
    seed: int = 0,
    workers: int = _WORKERS,
    between_samples_s: float = _BETWEEN_SAMPLES_S,
    between_pauses_s: float = _BETWEEN_PAUSES_S,
    csv: Path | None = None,
) -> Result:
    """Keep `server` under load for the given time."""
    result, log_length = Result(), len(server.log)
    samples = SamplerOutput(Tree.of(server.pid))
    async with Desk(server) as desk, Wire(server.grpc_url, server.http_url) as wire:
        gate = Gate()
        good = GoodStreams(desk, _GOOD_STREAMS, gate)
        load = Load(desk, wire, gate, seed=seed)
        async with good.running(), load.running(workers):
            end = time.monotonic() + seconds
            next_pause = time.monotonic() + between_pauses_s
            while time.monotonic() < end:
                await asyncio.sleep(between_samples_s)
                await asyncio.to_thread(samples.take)
                if time.monotonic() > next_pause:
                    next_pause = time.monotonic() + between_pauses_s
                    result.problems += await _idle_moment(server, gate)
                    if csv is not None:
                        samples.write(csv)
                    left = (end - time.monotonic()) / 60
                    print(f"{load.outcomes.total()} requests; {left:.0f} min to go", flush=True)
    result.outcomes = load.outcomes
    result.trends = list(samples.trends(_WARM_UP * seconds))
    result.problems += [*load.problems, *good.problems, *await aftermath(server, log_length)]
    if csv is not None:
        samples.write(csv)
    return result


async def _idle_moment(server: TritonServer, gate: Gate) -> list[str]:
    """Drain all requests; return what is not idle then."""
    await gate.close()
    problems = await not_idle(server)
    gate.open()
    return problems


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write every measurement to this file")
    arguments = parser.parse_args()
    with serving(**SETTINGS) as server:
        run = soak(server, seconds=60 * arguments.minutes, seed=arguments.seed, csv=arguments.csv)
        result = asyncio.run(run)
    result.show()
    stuck = [] if released_all(server) else ["a request was never released"]
    return report.verdict([*result.problems, *result.leaks, *stuck])


if __name__ == "__main__":
    sys.exit(main())
