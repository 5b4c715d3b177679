"""`trident bench stages --device null:MS`: what the stages carry at a rate that is set.

The engine's steps take the time that is set, whatever the machine. So each stream should get a
token per step; the figures say what it got.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.status import Status

from client.bench.cpu import CpuMeter
from client.bench.errors import BenchError
from client.bench.files import require_writable
from client.bench.paced_figures import Figures, cpu_table, figures, limits, rate_table
from client.bench.paced_generator import Generator, run_wait_s
from client.bench.workload import PromptSource, Workload
from client.commands.server_display import stopped_by_signals
from client.request import completion
from engine.errors import CheckpointError
from engine.hub import resolve_checkpoint, resolve_tokenizer
from engine.launch.server import TritonServer

_SETTLE_S = 1.0  # between the first answer of the last stream and the measurement


class PacedBenchmark:
    """Streams as many requests as asked for, each at the pace of the null device's steps.

    Args:
        workload: its `max_tokens`, `waves` and `rounds` have no meaning here.
        seconds: of the measurement, after all streams have begun.
    """

    def __init__(
        self,
        model: str,
        device: str,
        workload: Workload,
        console: Console,
        *,
        seconds: float,
        repository: Path | None = None,
    ) -> None:
        self._settings = {"model": model, "device": device}
        self._workload = workload
        self._console = console
        self._seconds = seconds
        self._repository = repository
        config = self._server(1).config
        assert config.null_step_s is not None
        if config.null_step_s <= 0:
            raise BenchError("--device: give the milliseconds of a step, such as null:10")
        self._step_s = config.null_step_s
        try:
            folder = resolve_tokenizer(config.tokenizer, resolve_checkpoint(model, weights=False))
            self._prompts = PromptSource(folder, workload.prompt_tokens)
        except CheckpointError as error:
            raise BenchError(str(error)) from None

    def run(self) -> list[Figures]:
        """Measure each number of streams, on a server of its own.

        Raises:
            ServerStartError, BenchError: the message says what to do.
        """
        found = []
        for streams in self._workload.streams:
            with (
                Status(f"{streams} streams", console=self._console),
                self._server(streams) as server,
            ):
                found.append(self._measure(server, streams))
        return found

    def _server(self, streams: int) -> TritonServer:
        settings = {**self._settings, "max_num_seqs": max(streams, 256)}
        return TritonServer(settings, repository=self._repository, ports=0)

    def _measure(self, server: TritonServer, streams: int) -> Figures:
        host, _, port = server.grpc_url.rpartition(":")
        with Generator(host, int(port), self._requests(streams)) as generator:
            generator.wait_until_answered()
            time.sleep(_SETTLE_S)
            meter = CpuMeter(server.pid, clients=[generator.pid])
            meter.start()
            begin, waited = time.monotonic(), run_wait_s(generator.pid)
            time.sleep(self._seconds)
            end, waited = time.monotonic(), run_wait_s(generator.pid) - waited
            cpu = meter.stop()
            arrivals = generator.stop()
        if any(is_last and at < end for _, at, _, is_last in arrivals):
            raise BenchError(
                "a stream ended within the measurement: lower --seconds or --prompt-tokens, or use "
                "a model of a longer context"
            )
        return figures(
            arrivals, streams, begin, end, step_s=self._step_s, cpu=cpu, generator_waited=waited
        )

    def _requests(self, streams: int) -> list[bytes]:
        sampling = {**self._workload.sampling, "max_tokens": None}
        return [
            completion(prompt.text, None, sampling, priority=0, request_id="")
            .message(batched=True, timeout=None)
            .SerializeToString()
            for prompt in self._prompts.draw(str(streams), streams)
        ]


def run(
    model: str,
    device: str,
    workload: Workload,
    console: Console,
    *,
    seconds: float,
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
        benchmark = PacedBenchmark(
            model, device, workload, console, seconds=seconds, repository=repository
        )
        rows = benchmark.run()
    console.print(rate_table(rows))
    console.print(cpu_table(rows))
    for text in limits(rows):
        console.print(text, highlight=False)
    console.print(
        f"{model} on {device}: no model is computed. {workload.prompt_tokens} tokens in, "
        f"{seconds:g} s measured. The load generator shares the "
        f"{len(os.sched_getaffinity(0))} cores with the server.",
        highlight=False,
    )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
