"""`trident bench stages`: the overhead of the ensemble, relative to the engine alone."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.status import Status

from client import AsyncTridentClient, SamplingOptions
from client.bench.cpu import CpuMeter
from client.bench.engine_alone import EngineAlone
from client.bench.errors import BenchError
from client.bench.files import require_writable
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave
from client.bench.report import Round, Row, as_json, cpu_table, row, throughput_table
from client.bench.waves import run_wave
from client.bench.workload import PromptSource, Workload
from client.commands.server_display import stopped_by_signals
from engine.errors import CheckpointError
from engine.hub import resolve_checkpoint, resolve_tokenizer
from engine.launch.server import TritonServer

_WARM_UP_TOKENS = 8

Waves = dict[int, list[Wave]]  # by number of streams


class StageBenchmark:
    """Runs the same requests through the engine alone and through the ensemble, alternating.

    Args:
        model, device: as in the engine's settings; others come from `engine.json` and `TRIDENT_*`.
        repository: a model repository to use instead of Trident's own.

    Raises:
        ServerStartError, BenchError: the message says what to do.
    """

    def __init__(
        self,
        model: str,
        workload: Workload,
        console: Console,
        *,
        device: str | None = None,
        repository: Path | None = None,
    ) -> None:
        self._workload = workload
        self._console = console
        self._settings = {"model": model, "device": device}
        self._repository = repository
        self._config = self._make_server().config
        try:
            folder = resolve_tokenizer(self._config.tokenizer, resolve_checkpoint(model))
            self._prompts = PromptSource(folder, workload.prompt_tokens)
        except CheckpointError as error:
            raise BenchError(str(error)) from None

    def run(self) -> tuple[list[Row], dict[int, list[Round]]]:
        """Measure; return the summary, and all rounds by number of streams."""
        rounds: dict[int, list[Round]] = {streams: [] for streams in self._workload.streams}
        for number in range(self._workload.rounds):
            sides = [self._engine_alone, self._ensemble]
            # Alternate the order, so that linear drift cancels.
            order = sides if number % 2 == 0 else sides[::-1]
            measured = {side: side(number) for side in order}
            engine, ensemble = (measured[side] for side in sides)
            for streams in self._workload.streams:
                rounds[streams].append(Round(engine[streams], ensemble[streams]))
        return [row(streams, measured) for streams, measured in rounds.items()], rounds

    def _make_server(self) -> TritonServer:
        return TritonServer(self._settings, repository=self._repository, ports=0)

    def _engine_alone(self, number: int) -> Waves:
        waves: Waves = {}
        with self._status(number, "engine alone") as say, EngineAlone(self._config) as engine:
            for streams in self._workload.streams:
                say(f"{streams} streams")
                engine.run(*self._warm_up(number, streams))
                waves[streams] = [
                    engine.run(prompts, self._workload.sampling)
                    for prompts in self._waves(number, streams)
                ]
                self._report(number, "engine alone", waves[streams])
        return waves

    def _ensemble(self, number: int) -> Waves:
        with self._status(number, "ensemble") as say, self._make_server() as server:
            return asyncio.run(self._load(number, server, say))

    async def _load(self, number: int, server: TritonServer, say: Callable[[str], None]) -> Waves:
        waves: Waves = {}
        meter = CpuMeter(server.pid)
        # No retries: a retried request would be measured as a slow one.
        async with AsyncTridentClient(server.grpc_url, model=server.model, retry=None) as client:
            for streams in self._workload.streams:
                say(f"{streams} streams")
                await run_wave(client, *self._warm_up(number, streams), meter)
                waves[streams] = [
                    await run_wave(client, prompts, self._workload.sampling, meter)
                    for prompts in self._waves(number, streams)
                ]
                self._report(number, "ensemble", waves[streams])
        return waves

    def _waves(self, number: int, streams: int) -> Iterator[list[Prompt]]:
        """Yield prompts not used by an earlier wave, to miss the prefix cache."""
        for wave in range(self._workload.waves):
            yield self._prompts.draw(f"{number}/{streams}/{wave}", streams)

    def _warm_up(self, number: int, streams: int) -> tuple[list[Prompt], SamplingOptions]:
        prompts = self._prompts.draw(f"{number}/{streams}/warm-up", streams)
        short = min(_WARM_UP_TOKENS, self._workload.max_tokens)
        return prompts, SamplingOptions(**{**self._workload.sampling, "max_tokens": short})

    @contextmanager
    def _status(self, number: int, side: str) -> Iterator[Callable[[str], None]]:
        """Show what is being measured; yields a function that changes the text."""
        title = f"round {number + 1} of {self._workload.rounds}, {side}: "
        with Status(f"{title}starting", console=self._console) as status:
            yield lambda words: status.update(f"{title}{words}")

    def _report(self, number: int, side: str, waves: Sequence[Wave]) -> None:
        speeds = ", ".join(f"{wave.tokens_per_second:.0f}" for wave in waves)
        text = f"round {number + 1}, {side}, {waves[0].streams} streams: {speeds} tok/s"
        self._console.print(text, highlight=False, soft_wrap=True)


def run(
    model: str,
    workload: Workload,
    console: Console,
    *,
    device: str | None = None,
    repository: Path | None = None,
    json_file: Path | None = None,
) -> None:
    """Measure, print the tables, and write the JSON file, if given.

    Raises:
        ServerStartError, BenchError: the message says what to do.
    """
    if json_file is not None:
        require_writable("--json", json_file)
    with stopped_by_signals():
        benchmark = StageBenchmark(model, workload, console, device=device, repository=repository)
        rows, rounds = benchmark.run()
    console.print(throughput_table(rows))
    console.print(cpu_table(rows))
    console.print(
        f"{model}, {workload.prompt_tokens} tokens in and {workload.max_tokens} out, greedy; "
        f"{workload.waves} waves in each of {workload.rounds} rounds: median (min-max). "
        f"The client shares the {len(os.sched_getaffinity(0))} cores with the server, and its "
        "work lowers the ensemble's figures. Inter-token is the time between two responses of a "
        "stream.",
        highlight=False,
    )
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(rows, rounds), indent=1), encoding="utf-8")
