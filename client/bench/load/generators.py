"""Generators: processes that send a plan's requests, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from client.bench.errors import BenchError
from client.bench.load.plan import Plan, Result
from client.bench.load.prompts import Turn
from client.bench.load.record import Record, Target
from client.bench.load.scrape import Metrics
from client.bench.load.worker import prepare, run
from engine.launch.worker_process import WorkerProcess

BUSY = 0.8  # share of the time from which a load generator may be the limit
LATE_S = 0.02  # sending later than this is the generator's doing
_START_S = 0.2  # from the word to the plan's beginning, so that all have heard it
_PER_PROCESS = 256  # users or sessions at once that one process is given


@dataclass(frozen=True)
class Ran:
    """A plan that was run from `start` on, a second of `time.monotonic`.

    Attributes:
        limit: why the figures may be those of the generator, or "".
        metrics: what the generator saw of the engine in its own process.
    """

    start: float
    records: list[Record]
    limit: str
    metrics: Metrics | None = None


class Generators:
    """A context manager: inside, the processes have warmed the server up and wait for `run`.

    Args:
        warm_up: asked by each before.
        processes: their number; by default as many as the plan needs.
        worker: the process to use instead, which stays.

    Raises:
        BenchError: the server does not answer as asked.
    """

    def __init__(
        self,
        target: Target,
        plan: Plan,
        *,
        warm_up: Sequence[Turn] = (),
        processes: int = 0,
        worker: WorkerProcess | None = None,
    ) -> None:
        self._worker = worker
        users = len(plan.sessions) if plan.concurrency is None else plan.concurrency
        count = (1 if worker else processes) or -(-users // _PER_PROCESS)
        count = min(count, users, len(plan.sessions))
        assert count > 0
        self._target, self._warm_up = target, warm_up
        self._plans = plan.parts(count)
        self._workers: list[WorkerProcess] = []

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that do nothing but generate load."""
        return [each.process.pid for each in self._workers if each is not self._worker]

    def run(self) -> Ran:
        """Send the plan.

        Raises:
            BenchError: a generator died.
        """
        start = time.monotonic() + _START_S
        before = {pid: _used(pid) for pid in self.pids}
        for each in self._workers:
            each.start(run, start)
        results = [_result(each) for each in self._workers]
        busy = max((_used(pid) - used for pid, used in before.items()), default=0.0)
        records = sorted((r for each in results for r in each.records), key=lambda r: r.intended)
        late = sorted(each.sent - each.intended for each in records)
        latest = late[int(0.99 * (len(late) - 1))] if late else 0.0  # of the latest percent
        share = busy / (time.monotonic() - start + _START_S)
        return Ran(start, records, _limit(share, latest), results[0].metrics)

    def __enter__(self) -> Self:
        try:
            for plan in self._plans:
                self._workers.append(self._worker or WorkerProcess())
                self._workers[-1].start(prepare, self._target, plan, self._warm_up)
                # One after the other: warming up must not be the largest load of all.
                _result(self._workers[-1])
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._workers:
            if each is not self._worker:
                each.end()


def _limit(busy: float, late_s: float) -> str:
    if busy > BUSY:
        return (
            f"a load generator was busy, or waiting for a core, {busy:.0%} of the time: "
            "the figures are those of the machine with it, not of the server alone"
        )
    if late_s > LATE_S:
        return f"requests were sent up to {1000 * late_s:.0f} ms late: latencies include it"
    return ""


def _result(worker: WorkerProcess) -> Result:
    try:
        found: Result = worker.result()
    except ChildProcessError:
        raise BenchError("a load generator process died; see its error above") from None
    if found.error:
        raise BenchError(found.error)
    return found


def _used(pid: int) -> float:
    """Return the seconds that `pid` has used cores, and that it was ready to without one."""
    used = psutil.Process(pid).cpu_times()
    waited = int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return used.user + used.system + waited
