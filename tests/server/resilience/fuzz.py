"""Sends malformed requests, and valid ones at the borders of what is allowed, to a running server,
beside streams that must not be affected.

    python -m tests.server.resilience.fuzz --requests 20000

Request N of a seed is deterministic: `--seed S --only N` repeats it and prints its reply.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from engine.launch.installation import model_repository
from engine.launch.server import TritonServer
from tests.server.resilience import report
from tests.server.resilience.desk import Desk
from tests.server.resilience.fuzzing import border_cases, grpc_cases, http_cases
from tests.server.resilience.fuzzing.case import Case
from tests.server.resilience.fuzzing.judge import GOOD, Judge
from tests.server.resilience.fuzzing.wire import Reply, Wire
from tests.server.resilience.gate import Gate
from tests.server.resilience.good_streams import GoodStreams
from tests.server.resilience.observe import complaints, not_idle
from tests.server.resilience.processes import Tree, is_alive
from tests.server.resilience.service import serving

NUM_GOOD_STREAMS = 8
_CONCURRENCY = 16
_EXAMPLES = 3  # shown per kind of failure


def make(seed: int, index: int) -> Case:
    """Return request `index` of the run with `seed`."""
    rng = random.Random(f"{seed}:{index}")
    (module,) = rng.choices((grpc_cases, http_cases, border_cases), (5, 3, 2))
    return module.make(rng)


@dataclass
class Result:
    """Outcomes by kind of request, and problems."""

    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    good_completed: int = 0

    def show(self) -> None:
        """Print the table by kind."""
        total = sum(self.outcomes.values(), Counter[str]())
        columns = [*GOOD, *sorted(set(total) - set(GOOD))]
        rows = [
            (kind, sum(counts.values()), *(counts[c] or "" for c in columns))
            for kind, counts in [*sorted(self.outcomes.items()), ("all", total)]
        ]
        report.show(
            f"Malformed and extreme requests, {self.seconds:.0f} s",
            ("kind", "sent", *columns),
            rows,
        )
        print(f"good streams completed meanwhile: {self.good_completed}")


async def fuzz(server: TritonServer, *, seed: int, requests: int) -> Result:
    """Send `requests` requests, several at a time."""
    result, log_length = Result(), len(server.log)
    before = Tree.of(server.pid).members()
    run_directories = Path(tempfile.gettempdir()) / "trident-"
    secrets = [model_repository(), run_directories, server.log_path.parent]
    judge = Judge([*secrets, Path(server.config.model)])
    async with Desk(server) as desk, Wire(server.grpc_url, server.http_url) as wire:
        good = GoodStreams(desk, NUM_GOOD_STREAMS, Gate())
        async with good.running():
            start = time.monotonic()
            run = _Run(seed, requests, wire, judge, result)
            await asyncio.gather(*(run.work() for _ in range(_CONCURRENCY)))
            result.seconds = time.monotonic() - start
        result.good_completed = good.completed
        result.problems += good.problems
        if not good.completed:
            result.problems.append("no good stream was completed meanwhile")
    ended = _ended(before)
    result.problems += [f"{role} has ended" for role in ended]
    if "tritonserver" in ended:
        result.problems.append("its last words: " + server.log[-2000:])
    else:
        result.problems += await not_idle(server)
    said = complaints(server.log[log_length:])
    result.problems += [f"in the log: {line}" for line in said[:_EXAMPLES]]
    return result


class _Run:
    """The requests of one run, shared by several workers."""

    def __init__(self, seed: int, requests: int, wire: Wire, judge: Judge, result: Result) -> None:
        self._seed = seed
        self._indices = iter(range(requests))
        self._wire = wire
        self._judge = judge
        self._result = result
        self._in_flight: set[int] = set()
        self._gone = False

    async def work(self) -> None:
        """Send requests until there are no more or the server is gone."""
        for index in self._indices:
            case = make(self._seed, index)
            self._in_flight.add(index)
            reply = await self._wire.send(case, index)
            self._record(index, case, reply)
            self._in_flight.remove(index)
            if reply.refused or self._gone:
                self._gone = True
                return

    def _record(self, index: int, case: Case, reply: Reply) -> None:
        outcome = self._judge(case, reply)
        counts = self._result.outcomes[case.kind]
        counts[outcome] += 1
        if outcome not in GOOD and counts[outcome] <= _EXAMPLES:
            said = reply.text[:200].replace("\n", " ") or f"beside {sorted(self._in_flight)}"
            self._result.problems.append(f"request {index} ({case.kind}): {outcome}: {said}")


def _ended(before: Mapping[str, psutil.Process]) -> list[str]:
    return [role for role, process in before.items() if not is_alive(process)]


async def repeat(server: TritonServer, *, seed: int, index: int) -> None:
    """Send one request and print it and its reply."""
    case = make(seed, index)
    print(f"{case.kind}, {case.transport}, {len(case.payload)} bytes: {case.payload[:1000]!r}")
    async with Wire(server.grpc_url, server.http_url) as wire:
        reply = await wire.send(case, index)
    print(Judge([model_repository()])(case, reply), reply)


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="send request N alone")
    arguments = parser.parse_args()
    with serving(max_model_len=border_cases.MAX_MODEL_LEN) as server:
        if arguments.only is not None:
            asyncio.run(repeat(server, seed=arguments.seed, index=arguments.only))
            return 0
        result = asyncio.run(fuzz(server, seed=arguments.seed, requests=arguments.requests))
    result.show()
    return report.verdict(result.problems)


if __name__ == "__main__":
    sys.exit(main())
