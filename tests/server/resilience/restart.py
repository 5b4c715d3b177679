"""Strikes at `trident serve` under load, after which it must come back by itself.

    python -m tests.server.resilience.restart --times 3

Each stream through the gateway must end with its full text or with an error event, and `[DONE]`;
what the server before has left must be gone, and a request be answered.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace

import grpc
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.server.resilience import report
from tests.server.resilience.kill_engine import Round
from tests.server.resilience.launched import Running, launched
from tests.server.resilience.service import checkpoint

# Each token takes 20 ms, so that a stream outlasts what happens to the server.
SETTINGS = ("--device", "null:20")
NUM_STREAMS = 20
_MAX_TOKENS = 400
_ENDED_WITHIN_S = 20.0
KILLED_ENDED_WITHIN_S = 5.0  # else a stream takes 8 s; usually they end within 0.3 s
_BACK_WITHIN_S = 120.0  # on a machine that is busy with other things
_STOPPED_S = 3.0
_NUM_ATTEMPTS = 100

Strike = Callable[[Running], None]


class GatewayStream(threading.Thread):
    """One answer through the gateway, read to its end.

    Attributes:
        outcome: `complete`, `error` (an error event, then `[DONE]`), `refused` (a status of its
            own) or `cut off`; `open` before its end.
    """

    def __init__(self, openai_url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.outcome = "open"
        self.has_begun = threading.Event()
        self._url = openai_url
        self._body = {"prompt": "a", "stream": True, "ignore_eos": True, "max_tokens": max_tokens}
        self.start()

    def run(self) -> None:
        """Send the request and read the answer."""
        try:
            with closing(http.client.HTTPConnection(self._url, timeout=60)) as connection:
                headers = {"content-type": "application/json"}
                connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
                self.outcome = self._read(connection.getresponse())
        except (OSError, http.client.HTTPException):
            self.outcome = "cut off"

    def _read(self, answer: http.client.HTTPResponse) -> str:
        if answer.status != 200:
            return "refused"
        events = []
        while line := answer.readline():
            if line.strip():
                events.append(line)
                self.has_begun.set()
        if events[-1].strip() != b"data: [DONE]":
            return "cut off"
        return "error" if b'"error"' in events[-2] else "complete"


def begun_streams(running: Running, max_tokens: int) -> list[GatewayStream]:
    """Return 20 streams, each of which has had a piece of its answer."""
    streams = [GatewayStream(running.openai_url, max_tokens) for _ in range(NUM_STREAMS)]
    for each in streams:
        assert each.has_begun.wait(60), "the server does not answer"
    return streams


def kill(role: str) -> Strike:
    """Return what kills tritonserver or a stage of it."""
    return lambda running: running.tree.members()[role].kill()


def stop(role: str) -> Strike:
    """Return what stops a stage for a while, with requests that want it, and lets it go on."""

    def strike(running: Running) -> None:
        stage = running.tree.members()[role]
        stage.suspend()
        try:
            short = [GatewayStream(running.openai_url, max_tokens=2) for _ in range(8)]
            time.sleep(_STOPPED_S)
        finally:
            with suppress(psutil.NoSuchProcess):
                stage.resume()
        for each in short:
            each.join(60)

    return strike


def stop_all(running: Running) -> None:
    """Stop every process for a while, as `docker pause` does, and let them go on."""
    stopped = list(running.footprint().processes)
    for each in stopped:
        each.suspend()
    time.sleep(_STOPPED_S + 1)
    for each in stopped:
        each.resume()


def nested_body(running: Running) -> None:
    """Send JSON that overflows tritonserver's stack: 24 MB, which no proxy would let through."""
    levels = 12_000_000
    with closing(http.client.HTTPConnection(running.http_url, timeout=60)) as connection:
        body = b'{"text_input":%b%b}' % (b"[" * levels, b"]" * levels)
        try:
            connection.request("POST", "/v2/models/ensemble/generate", body)
            connection.getresponse()
        except (OSError, http.client.HTTPException):
            return


def two_wrong_requests(running: Running) -> None:
    """Alternate two kinds of wrong requests on gRPC streams until tritonserver 24.10 aborts."""
    for _ in range(_NUM_ATTEMPTS):
        with grpc.insecure_channel(running.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            requests = [_wrong(model) for _ in range(8) for model in ("unknown", "engine")]
            try:
                for _ in stub.ModelStreamInfer(iter(requests)):
                    pass
            except grpc.RpcError:
                return


def _wrong(model: str) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    tensor = request.inputs.add(name="no_such_input", datatype="BYTES", shape=[1, 1])
    assert tensor.name
    request.raw_input_contents.append(b"\1\0\0\0a")
    return request


STRIKES: dict[str, Strike] = {
    "kill -9 of tritonserver": kill("tritonserver"),
    "kill -9 of the tokenizer": kill("tokenizer"),
    "kill -9 of the engine stub": kill("engine"),
    "kill -9 of the detokenizer": kill("detokenizer"),
    "SIGSTOP of the tokenizer": stop("tokenizer"),
    "SIGSTOP of the detokenizer": stop("detokenizer"),
    "SIGSTOP of all": stop_all,
    "nested JSON": nested_body,
    "two wrong requests": two_wrong_requests,
}


def restart(running: Running, name: str) -> Round:
    """Strike at a server under load, and report how its streams end and when it is back."""
    result = Round(name)
    streams = begun_streams(running, _MAX_TOKENS)
    old, footprint = running.tree.head, running.tree.footprint()
    began = time.monotonic()
    STRIKES[name](running)
    is_killed = name.startswith("kill")
    ended_within_s = KILLED_ENDED_WITHIN_S if is_killed else _ENDED_WITHIN_S
    result.problems += wrong_ends(streams, time.monotonic() + ended_within_s)
    outcomes = [each.outcome for each in streams]
    result.errors, result.complete = outcomes.count("error"), outcomes.count("complete")
    while not is_served(running):
        if time.monotonic() > began + _BACK_WITHIN_S:
            result.problems.append("it does not come back")
            return result
        time.sleep(0.1)
    result.recovery_s = time.monotonic() - began
    if running.tree.head != old:
        left = replace(footprint, ports=frozenset()).remains()  # the new server has its ports
        result.problems += [f"left: {each}" for each in left]
    elif not name.startswith("SIGSTOP"):  # which Triton may bear
        result.problems.append("tritonserver did not die of it")
    return result


def wrong_ends(streams: Sequence[GatewayStream], deadline: float) -> list[str]:
    """Return how streams have ended that have no right end by the deadline."""
    for each in streams:
        each.join(max(deadline - time.monotonic(), 0))
    ends = Counter(each.outcome for each in streams)
    return [f"{n} streams: {end}" for end, n in ends.items() if end not in ("complete", "error")]


def is_served(running: Running) -> bool:
    """Return whether a request is answered."""
    stream = GatewayStream(running.openai_url, max_tokens=2)
    stream.join(60)
    return stream.outcome == "complete"


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the name of a strike")
    arguments = parser.parse_args()
    names = [name for name in STRIKES if arguments.only in name] * arguments.times
    with checkpoint() as model, launched(model, *SETTINGS, has_gateway=True) as running:
        rounds = [restart(running, name) for name in names]
    rows = [(each.what, each.complete, each.errors, each.recovery_s) for each in rounds]
    columns = ("strike", "complete", "errors", "s")
    report.show("Until the server was back", columns, rows)
    return report.verdict([f"{each.what}: {p}" for each in rounds for p in each.problems])


if __name__ == "__main__":
    sys.exit(main())
