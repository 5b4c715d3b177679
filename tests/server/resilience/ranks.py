"""Strikes each rank of a model under load: what the streams, the service and the machine then do.

.venv/bin/python -m tests.server.resilience.ranks --times 10
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.engine_process import engine_process
from tests.server.resilience.service import checkpoint
from tests.waiting import eventually

PROMPT = "to be or not to be"
TOKENS = 24
HEARTBEAT_TIMEOUT_S = 3


@contextmanager
def ranked(model: Path, num_ranks: int) -> Iterator[TritonServer]:
    """Run a server whose model is in `num_ranks` processes."""
    settings = {"model": str(model), "dtype": "float32", "tensor_parallel_size": num_ranks}
    settings["heartbeat_timeout_s"] = HEARTBEAT_TIMEOUT_S
    with TritonServer(settings, ports=0, start_timeout_s=180) as server:
        yield server


def inputs(num_tokens: int) -> dict[str, Any]:
    """Return the inputs of a greedy request."""
    params = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(params),
    }


def rank_processes(server: TritonServer) -> list[psutil.Process]:
    """Return the processes of all ranks, rank 0 first."""
    engine = engine_process(server)
    # Beside them there may be the process that tries grammars.
    ranks = [child for child in engine.children() if "engine.service.rank" in child.cmdline()]
    return [engine, *sorted(ranks, key=lambda rank: rank.cmdline())]


def end_of(server: TritonServer, begun: Event) -> tuple[str, float]:
    """Return the error that ends a long stream, and when; set `begun` at its first response."""
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        try:
            for _ in caller.stream(**inputs(480), stream=True):
                begun.set()
        except InferError as error:
            return str(error), time.monotonic()
    return "", time.monotonic()


def answers(server: TritonServer, expected: str) -> bool:
    """Return whether the server gives the expected text."""
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        try:
            return caller.text(**inputs(TOKENS)) == expected
        except (InferError, grpc.RpcError):
            return False


def strike(
    server: TritonServer, which: int, blow: signal.Signals, num_streams: int, expected: str
) -> tuple[list[str], float, float]:
    """Send `blow` to a rank under streams.

    Returns:
        The errors of the streams, the seconds until the last one came, and those until the server
        answers again.
    """
    ranks = rank_processes(server)
    begun = [Event() for _ in range(num_streams)]
    with ThreadPoolExecutor(num_streams) as pool:
        streams = [pool.submit(end_of, server, each) for each in begun]
        assert all(each.wait(60) for each in begun)
        struck = time.monotonic()
        ranks[which].send_signal(blow)
        ends = [stream.result(60) for stream in streams]
    assert eventually(lambda: not any(rank.is_running() for rank in ranks))
    assert eventually(lambda: answers(server, expected))
    return (
        [text for text, _ in ends],
        max(end for _, end in ends) - struck,
        time.monotonic() - struck,
    )


def main() -> None:
    """Strike each rank, and print how long it took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--times", type=int, default=10)
    options = parser.parse_args()
    with checkpoint() as model, ranked(model, options.ranks) as server:
        with closing(Caller(server.grpc_url, server.http_url)) as caller:
            expected = caller.text(**inputs(TOKENS))
        blows = (signal.SIGKILL, signal.SIGSTOP)
        for which, blow in ((i, blow) for i in range(options.ranks) for blow in blows):
            found = [
                strike(server, which, blow, options.streams, expected) for _ in range(options.times)
            ]
            named = sum(f"rank {which}" in text for errors, *_ in found for text in errors)
            lost = sum(not text for errors, *_ in found for text in errors)
            ended, served = ([each[i] for each in found] for i in (1, 2))
            print(
                f"rank {which}, {blow.name}: last error after {statistics.median(ended):.2f} s "
                f"(at most {max(ended):.2f}), answers after {statistics.median(served):.1f} s "
                f"(at most {max(served):.1f}); {named} of "
                f"{options.times * options.streams} errors name it, {lost} streams had none",
                flush=True,
            )
        left = len(rank_processes(server)) - options.ranks
        print(f"processes too many at the end: {left}")


if __name__ == "__main__":
    main()
