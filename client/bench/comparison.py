"""Starts the servers in turn and applies the same load to each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from client.bench.load.prompts import PromptSource
from client.bench.load.workload import Workload
from client.bench.measure.measurement import Measurement
from client.bench.measure.run import first_token, run_workload
from client.bench.report.results import Results, Run
from client.bench.servers.server import Server
from client.errors import TridentClientError
from engine.errors import TridentError


class Comparison:
    """Measures several servers on one checkpoint.

    Args:
        tridents, peers: the servers; ratios are relative to each of `tridents`.
        model: the checkpoint's folder.
        rounds: number of starts and measurements per server.
        processes: of the load generator; 0: as many as it needs.
    """

    def __init__(
        self,
        tridents: Sequence[Server],
        peers: Sequence[Server],
        model: Path,
        workloads: Sequence[Workload],
        rounds: int,
        console: Console,
        *,
        processes: int = 0,
    ) -> None:
        self._processes = processes
        self._servers = [*tridents, *peers]
        self._results = Results(workloads, [server.name for server in tridents])
        self._rounds = rounds
        self._console = console
        self._source = PromptSource(model)

    def run(self) -> Results:
        """Measure. A server that fails is left out of later rounds.

        An interrupt ends the run early and keeps what has been measured.

        Raises:
            KeyboardInterrupt: before anything was measured.
        """
        results = self._results
        try:
            for number in range(self._rounds):
                # Alternate the order, so that linear drift cancels.
                for server in self._servers if number % 2 == 0 else reversed(self._servers):
                    if server.name not in results.failures:
                        self._measure(server, number)
        except KeyboardInterrupt:
            if not results.runs:
                raise
            results.interrupted = True
            self._say("interrupted: this is what was measured until then")
        return results

    def _measure(self, server: Server, number: int) -> None:
        """Start and measure a server."""
        title = f"round {number + 1} of {self._rounds}, {server.name}: "
        try:
            with self._console.status(f"{title}starting") as status, server.start() as running:
                start = first_token(running, self._source, f"{number}/first")
                for workload in self._results.workloads:
                    status.update(f"{title}{workload.name}")
                    one = run_workload(
                        *(running, workload, self._source, f"{number}/{workload.name}"),
                        processes=self._processes,
                    )
                    self._results.runs.append(Run(server.name, workload.name, number, start, one))
                    self._report(f"round {number + 1}, {server.name}, {workload.name}", one)
        except (TridentClientError, TridentError) as error:
            self._results.failures[server.name] = str(error)
            self._say(f"{server.name}: left out from now on: {error}")

    def _report(self, title: str, one: Measurement) -> None:
        words = [f"{title}: {one.tokens_per_second:.1f} tok/s"]
        if one.is_disturbed:
            words.append(f"disturbed: others took {one.others:.1%}")
        if one.failed:
            words.append(f"{one.failed} failed ({one.refused} refused), the first: {one.error}")
        if one.falls_behind:
            words.append("the load is above the capacity: latency grows without bound")
        if one.limit:
            words.append(one.limit)
        self._say(", ".join(words))

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
