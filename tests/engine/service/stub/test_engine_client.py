"""The engine process and its client, with real processes and a fake engine in them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import (
    CheckpointError,
    ConfigError,
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    TridentError,
)
from engine.protocol import channel
from engine.service.stub.engine_client import EngineClient
from tests.engine.service.stub.clients import Unobserved, assert_alive, start, submit, tokens
from tests.engine.service.stub.fake_engine import BAD_REQUEST, BUG, FULL, HANGS
from tests.waiting import eventually


def test_requests_are_answered_side_by_side(client: EngineClient) -> None:
    sinks = [submit(client, 100 * i, 20, num_sequences=2)[1] for i in range(1, 9)]
    assert all(sink.ended.wait(60) for sink in sinks)
    for i, sink in enumerate(sinks, start=1):
        assert tokens(sink, 0) == [100 * i + k for k in range(20)]
        assert tokens(sink, 1) == [100 * i + 1 + k for k in range(20)]


def test_it_reports_how_it_starts() -> None:
    said: list[str] = []
    client = start(said=said)
    assert said == ["pretending to load", "a fake"]
    assert client.ready.max_model_len == 512
    client.close()
    client.close()


@pytest.mark.parametrize(
    ("first", "kind", "text"),
    [
        (BAD_REQUEST, RequestError, "input_ids: is bad"),
        (FULL, QueueFullError, "Maximum queue size of 0 requests reached"),
        (BUG, TridentError, "internal error"),
    ],
)
def test_what_is_wrong_with_a_request_ends_only_it(
    client: EngineClient, first: int, kind: type[TridentError], text: str
) -> None:
    _, other = submit(client, 1000, 100)
    _, sink = submit(client, first)
    assert sink.ended.wait(60)
    assert type(sink.error) is kind
    assert str(sink.error) == text
    assert other.ended.wait(60)
    assert tokens(other) == list(range(1000, 1100))


def test_a_request_that_is_too_large_is_refused(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(channel, "MAX_FRAME_BYTES", 10)
        _, sink = submit(client, 1)
    _, other = submit(client, 1, max_tokens=2**64)
    for refused in (sink, other):
        assert refused.ended.wait(60)
        assert isinstance(refused.error, RequestError)
        assert "too large" in str(refused.error)
    assert_alive(client)


def test_abort_ends_a_request_at_once(client: EngineClient) -> None:
    uid, sink = submit(client, 1, 1_000_000)
    client.abort(uid)
    client.abort(uid)
    client.abort(424242)
    assert sink.ended.wait(60)
    assert isinstance(sink.error, RequestCancelledError)
    assert_alive(client)


def test_stop_ends_requests_by_their_id(client: EngineClient) -> None:
    stopped = [submit(client, i, 1_000_000, request_id="a")[1] for i in (1, 2)]
    other = submit(client, 3, 100, request_id="b")[1]
    assert eventually(lambda: all(sink.responses for sink in stopped))
    assert client.stop("a") == 2
    assert client.stop("nobody's") == 0
    for sink in stopped:
        assert sink.ended.wait(60)
        assert sink.error is None
        assert sink.responses[-1][0].details.finish_reason == "abort"
        assert tokens(sink) == list(range(tokens(sink)[0], tokens(sink)[0] + len(tokens(sink))))
    assert other.ended.wait(60)
    assert len(tokens(other)) == 100


@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        ("broken", CheckpointError, "^model.safetensors: is missing$"),
        ("bug", TridentError, "ZeroDivisionError: oops"),
        ("crash", EngineDeadError, "status 7"),
    ],
)
def test_a_failed_start_says_why(model: str, kind: type[TridentError], text: str) -> None:
    with pytest.raises(kind, match=text):
        start(model)


def test_an_interpreter_that_does_not_exist_says_so() -> None:
    with pytest.raises(ConfigError, match="python-of-nowhere"):
        EngineClient(EngineConfig(), Unobserved(), python="python-of-nowhere")


def test_close_ends_even_a_process_that_hangs(client: EngineClient) -> None:
    _, sink = submit(client, HANGS)
    time.sleep(0.1)
    client.close()
    assert isinstance(sink.error, EngineDeadError)


def test_the_process_ends_with_its_parent_even_inside_a_step(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys, time\n"
        "from tests.engine.service.stub.clients import start, submit\n"
        "from tests.engine.service.stub.fake_engine import HANGS\n"
        "client = start()\n"
        "submit(client, HANGS)\n"
        "time.sleep(0.1)\n"
        "print(client.process_id, flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(child, signal.SIGINT)  # Ctrl-C is not for the engine process
        time.sleep(0.1)
        os.kill(child, 0)
        parent.kill()

    def has_ended() -> bool:  # maybe a zombie: nobody here reaps orphans
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state == "Z"

    assert eventually(has_ended)
