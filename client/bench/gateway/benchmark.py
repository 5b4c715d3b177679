"""GatewayBenchmark: waves of requests over gRPC and through a gateway in turns, and the figures."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from client.bench.cpu import GATEWAY, CpuMeter
from client.bench.errors import BenchError
from client.bench.files import require_writable
from client.bench.gateway.fronts import Front, GatewayFront, GrpcFront
from client.bench.gateway.stream_reader import read_streams
from client.bench.load.prompts import Prompt
from client.bench.measurement import Wave
from client.bench.report import Spread, cpu_per_1000_tokens, throughput
from client.bench.waves import summary
from client.bench.workload import PromptSource, Workload
from client.commands.gateway_process import GatewayOptions, GatewayProcess, gateway_endpoint
from client.commands.server_display import stopped_by_signals
from engine.errors import CheckpointError
from engine.hub import resolve_checkpoint, resolve_tokenizer
from engine.launch.server import TritonServer


@dataclass(frozen=True)
class Round:
    """The waves of one number of streams in one round."""

    grpc: list[Wave]
    gateway: list[Wave]


@dataclass(frozen=True)
class Row:
    """The figures of one number of streams.

    Attributes:
        grpc, gateway: output tokens per second of each wave.
        ratio: of the gateway's to gRPC's, per round, so that machine load cancels.
        grpc_ttft, gateway_ttft: median over all requests, in seconds.
        gateway_cpu: CPU seconds of the gateway per 1000 tokens.
    """

    streams: int
    grpc: Spread
    gateway: Spread
    ratio: Spread
    grpc_ttft: float
    gateway_ttft: float
    gateway_cpu: float


class GatewayBenchmark:
    """Sends waves of the same form to one server, over gRPC and through a gateway in turns.

    Args:
        model: as in the engine's settings; others come from `engine.json` and `TRIDENT_*`.
        workers: processes of the gateway.

    Raises:
        ServerStartError, BenchError: the message says what to do.
    """

    def __init__(self, model: str, workload: Workload, console: Console, *, workers: int) -> None:
        self._workload = workload
        self._console = console
        self._workers = workers
        settings = {"model": model, "max_num_seqs": max(*workload.streams, 256)}
        self._server = TritonServer(settings, ports=0)
        try:
            folder = resolve_tokenizer(self._server.config.tokenizer, resolve_checkpoint(model))
            self._prompts = PromptSource(folder, workload.prompt_tokens)
        except CheckpointError as error:
            raise BenchError(str(error)) from None

    def run(self) -> dict[int, list[Round]]:
        """Measure; return all rounds by number of streams."""
        endpoint = gateway_endpoint(self._server, GatewayOptions("0", "127.0.0.1"))
        assert endpoint is not None
        with ExitStack() as stack:
            self._console.print("Starting the server and the gateway ...")
            server = stack.enter_context(self._server)
            gateway = stack.enter_context(
                GatewayProcess(server, endpoint, self._workers, server.log_path)
            )
            meter = CpuMeter(server.pid, gateway.pid)
            fronts = (
                GrpcFront(server.grpc_url, server.model),
                GatewayFront(endpoint.address, endpoint.port),
            )
            return {
                streams: [
                    self._round(number, streams, fronts, meter)
                    for number in range(self._workload.rounds)
                ]
                for streams in self._workload.streams
            }

    def _round(
        self, number: int, streams: int, fronts: tuple[Front, Front], meter: CpuMeter
    ) -> Round:
        waves: dict[str, list[Wave]] = {front.name: [] for front in fronts}
        for wave in range(self._workload.waves + 1):  # the first one is a warm-up
            # Alternate the order, so that linear drift cancels.
            for front in fronts if (number + wave) % 2 else fronts[::-1]:
                # Prompts that no earlier wave had, to miss the prefix cache.
                prompts = self._prompts.draw(f"{number}/{streams}/{wave}/{front.name}", streams)
                measured = self._wave(front, prompts, meter)
                if wave:
                    waves[front.name].append(measured)
        for name, measured_waves in waves.items():
            speeds = ", ".join(f"{wave.tokens_per_second:.0f}" for wave in measured_waves)
            text = f"round {number + 1}, {streams} streams, {name}: {speeds} tok/s"
            self._console.print(text, highlight=False, soft_wrap=True)
        return Round(*(waves[front.name] for front in fronts))

    def _wave(self, front: Front, prompts: Sequence[Prompt], meter: CpuMeter) -> Wave:
        size = front.per_connection
        groups = [prompts[first : first + size] for first in range(0, len(prompts), size)]
        with ExitStack() as stack:
            connections = [
                stack.enter_context(closing(front.connection(group, self._workload.sampling)))
                for group in groups
            ]
            meter.start()
            started = time.perf_counter()
            arrivals = read_streams(connections, [len(each) for each in groups], front.is_last)
            cpu_seconds = meter.stop()
        traces = [front.trace(each) for each in arrivals]
        if wrong := {trace.num_tokens for trace in traces} - {self._workload.max_tokens}:
            raise BenchError(
                f"{front.name}: {self._workload.max_tokens} tokens were asked for, and an answer "
                f"has {wrong.pop()}"
            )
        return replace(summary(traces, started), cpu_seconds=cpu_seconds)


def row(streams: int, rounds: Sequence[Round]) -> Row:
    """Summarise the rounds of one number of streams."""
    grpc = [wave for each in rounds for wave in each.grpc]
    gateway = [wave for each in rounds for wave in each.gateway]
    return Row(
        streams,
        grpc=Spread.of([wave.tokens_per_second for wave in grpc]),
        gateway=Spread.of([wave.tokens_per_second for wave in gateway]),
        ratio=Spread.of([throughput(each.gateway) / throughput(each.grpc) for each in rounds]),
        grpc_ttft=median(ttft for wave in grpc for ttft in wave.ttfts),
        gateway_ttft=median(ttft for wave in gateway for ttft in wave.ttfts),
        gateway_cpu=cpu_per_1000_tokens(gateway)[GATEWAY],
    )


def table(rows: Sequence[Row]) -> Table:
    """Return the table of all rows."""
    made = Table(
        title="gRPC to the ensemble, and through the gateway",
        caption="tok/s and ratio: median, min-max; TTFT: p50; CPU of the gateway",
    )
    for name in (
        "streams",
        "gRPC\ntok/s",
        "gateway\ntok/s",
        "ratio",
        "TTFT ms\ngRPC",
        "TTFT ms\ngateway",
        "CPU s /\n1000 tok",
    ):
        made.add_column(name, justify="right")
    for each in rows:
        made.add_row(
            str(each.streams),
            f"{each.grpc:.0f}",
            f"{each.gateway:.0f}",
            f"{each.ratio:.2f}",
            f"{1000 * each.grpc_ttft:.1f}",
            f"{1000 * each.gateway_ttft:.1f}",
            f"{each.gateway_cpu:.3f}",
        )
    return made


def run(
    model: str, workload: Workload, console: Console, *, workers: int, json_file: Path | None
) -> None:
    """Measure, print the table, and write the JSON file, if given.

    Raises:
        ServerStartError, BenchError: the message says what to do.
    """
    if json_file is not None:
        require_writable("--json", json_file)
    with stopped_by_signals():
        rounds = GatewayBenchmark(model, workload, console, workers=workers).run()
    rows = [row(streams, measured) for streams, measured in rounds.items()]
    console.print(table(rows))
    console.print(
        f"{model}, {workload.prompt_tokens} tokens in and {workload.max_tokens} out, greedy; "
        f"{workload.waves} waves in each of {workload.rounds} rounds. Server, gateway and load "
        f"generator share {len(os.sched_getaffinity(0))} cores.",
        highlight=False,
    )
    if json_file is not None:
        found = {
            "summary": [asdict(each) for each in rows],
            "rounds": {str(n): [asdict(each) for each in found] for n, found in rounds.items()},
        }
        json_file.write_text(json.dumps(found, indent=1), encoding="utf-8")
