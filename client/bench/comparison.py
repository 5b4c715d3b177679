"""Starts the servers in turn and applies the same load to each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass
class Comparison:
    """Measures several servers on one checkpoint.

    Attributes:
        tridents, peers: the servers; ratios are relative to each of `tridents`.
        model: the checkpoint's folder.
        rounds: number of starts and measurements per server.
        processes: of the load generator; 0: as many as it needs.
    """

    tridents: Sequence[Server]
    peers: Sequence[Server]
    model: Path
    workloads: Sequence[Workload]
    rounds: int
    console: Console
    processes: int = 0

    def run(self) -> Results:
        """Measure. A server that fails is left out of later rounds.

        An interrupt ends the run early and keeps what has been measured.

        Raises:
            KeyboardInterrupt: before anything was measured.
        """
        results = Results(self.workloads, [server.name for server in self.tridents])
        servers, source = [*self.tridents, *self.peers], PromptSource(self.model)
        try:
            for number in range(self.rounds):
                # Alternate the order, so that linear drift cancels.
                for server in servers if number % 2 == 0 else reversed(servers):
                    if server.name not in results.failures:
                        self._measure(server, number, source, results)
        except KeyboardInterrupt:
            if not results.runs:
                raise
            results.interrupted = True
            self._say("interrupted: this is what was measured until then")
        return results

    def _measure(self, server: Server, number: int, source: PromptSource, results: Results) -> None:
        title = f"round {number + 1} of {self.rounds}, {server.name}: "
        try:
            with self.console.status(f"{title}starting") as status, server.start() as running:
                start = first_token(running, source, f"{number}/first")
                for workload in self.workloads:
                    status.update(f"{title}{workload.name}")
                    one = run_workload(
                        *(running, workload, source, f"{number}/{workload.name}"),
                        processes=self.processes,
                    )
                    results.runs.append(Run(server.name, workload.name, number, start, one))
                    self._report(f"round {number + 1}, {server.name}, {workload.name}", one)
        except (TridentClientError, TridentError) as error:
            results.failures[server.name] = str(error)
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
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
