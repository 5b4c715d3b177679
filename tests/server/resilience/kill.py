"""Kills processes with SIGKILL under load, and checks streams, recovery and what is left behind.

    python -m tests.server.resilience.kill --times 10

Streams must end with an error or their full text within 5 s, and new requests must succeed within
15 s; if the launcher, or a server without one, is killed, no process, socket, port or shared memory
may be left after 15 s.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Iterable, Iterator
from statistics import median

from engine.launch.server import TritonServer
from tests.server.resilience import report
from tests.server.resilience.chorus import Chorus
from tests.server.resilience.desk import Desk
from tests.server.resilience.kill_engine import (
    SETTINGS,
    Round,
    kill_client,
    kill_engine,
    poison,
    stop_engine,
)
from tests.server.resilience.kill_server import TARGETS, kill_server
from tests.server.resilience.service import START_TIMEOUT_S, checkpoint

STREAMS = 32


def rounds(times: int, seed: int, only: str) -> Iterator[Round]:
    """Yield the result of each round, `times` of each kind whose name contains `only`."""
    rng = random.Random(seed)
    chorus = Chorus(STREAMS, max_tokens=300)
    with checkpoint() as model:
        settings = {"model": str(model), "dtype": "float32", **SETTINGS}
        with TritonServer(settings, ports=0, start_timeout_s=START_TIMEOUT_S) as server:
            asyncio.run(_learn(server, chorus))
            for kind in (kill_engine, stop_engine, kill_client):
                for _ in range(times if only in kind.__name__ else 0):
                    yield asyncio.run(kind(server, chorus, rng))
            if only in "poison":
                yield asyncio.run(poison(server, chorus))
        for name, start, role in TARGETS:
            for _ in range(times if only in f"{name}: {role}" else 0):
                yield kill_server(model, chorus, rng, name, start, role)


async def _learn(server: TritonServer, chorus: Chorus) -> None:
    async with Desk(server) as desk:
        await chorus.learn(desk)


def show(results: Iterable[Round]) -> None:
    """Print the table."""
    by_kind: dict[str, list[Round]] = {}
    for each in results:
        by_kind.setdefault(each.what, []).append(each)
    rows = []
    for kind, group in by_kind.items():
        seconds = [each.recovery_s for each in group]
        counts = (sum(each.complete for each in group), sum(each.errors for each in group))
        bad = sum(bool(each.problems) for each in group)
        rows.append((kind, len(group), *counts, median(seconds), max(seconds), bad))
    columns = ("killed", "times", "complete", "errors", "median s", "max s", "bad")
    report.show("Until service went on, or all was gone", columns, rows)


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a part of the name of what to kill")
    arguments = parser.parse_args()
    results = []
    for each in rounds(arguments.times, arguments.seed, arguments.only):
        print(f"{each.what}: {each.recovery_s:.1f} s {'; '.join(each.problems)}", flush=True)
        results.append(each)
    show(results)
    return report.verdict([f"{each.what}: {p}" for each in results for p in each.problems])


if __name__ == "__main__":
    sys.exit(main())
