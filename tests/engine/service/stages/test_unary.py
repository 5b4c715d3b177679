"""The stage that answers once, against an engine stub that the test plays."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, RequestError
from engine.protocol.channel import Channel
from engine.protocol.messages import Chunk, OutputDetails
from engine.service.stages import unary
from engine.service.stages.request_inputs import parse_inputs
from engine.service.stages.tokenizer_queue import TokenizerQueue
from engine.service.stages.unary import UnaryCall, UnaryStage
from engine.service.tensors import Tensors
from engine.service.unary_link import (
    FromEngineStub,
    ToEngineStub,
    UnaryAnswer,
    UnaryCancel,
    UnaryFailed,
    UnaryRequest,
    UnaryStop,
)

StubChannel = Channel[FromEngineStub, ToEngineStub]
Answers = queue.Queue[Tensors | Exception]


class Stub:
    """Engine stubs, one for each connection."""

    def __init__(self) -> None:
        self.channels: queue.Queue[StubChannel] = queue.Queue()

    def connect(self) -> Channel[ToEngineStub, FromEngineStub]:
        ours, theirs = socket.socketpair()
        self.channels.put(Channel(ours, ToEngineStub))
        return Channel(theirs, FromEngineStub)

    def connected(self) -> StubChannel:
        return self.channels.get(timeout=60)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    stub = Stub()
    monkeypatch.setattr(unary, "connect", stub.connect)
    return stub


@pytest.fixture
def stage() -> Iterator[UnaryStage]:
    stage = UnaryStage(EngineConfig())
    yield stage
    stage.close()


def call(answers: Answers, *, gone: bool = False, **tensors: np.ndarray) -> UnaryCall:
    return UnaryCall(tensors, {}, 0, "id", answers.put, lambda: gone)


TEXT = np.array([b"The capital of France is"], dtype=object)
STOP = np.array([True])


def test_an_answer_goes_to_its_request(stage: UnaryStage, stub: Stub) -> None:
    first: Answers = queue.Queue()
    second: Answers = queue.Queue()
    stage.submit(call(first, text_input=TEXT, max_tokens=np.array([4])))
    stage.submit(call(second, stop=STOP))
    channel = stub.connected()
    request, stop = channel.receive(), channel.receive()
    assert isinstance(request, UnaryRequest)
    assert stop == UnaryStop(request.number + 1, "id")
    channel.send(UnaryFailed(stop.number, EngineDeadError("no").report()))
    chunk = Chunk(0, b"", b"", OutputDetails(finish_reason="stop"), text_prefix="é")
    channel.send(UnaryAnswer(request.number, [chunk], 16))
    answer = first.get(timeout=60)
    assert not isinstance(answer, Exception)
    assert answer["text_output"].tolist() == ["é".encode()]
    error = second.get(timeout=60)
    assert (type(error), str(error)) == (EngineDeadError, "no")
    channel.close()


def test_a_lost_engine_stub_ends_its_requests_and_the_next_connects_anew(
    stage: UnaryStage, stub: Stub
) -> None:
    answers: Answers = queue.Queue()
    stage.submit(call(answers, stop=STOP))
    stub.connected().close()
    assert isinstance(answers.get(timeout=60), EngineDeadError)
    while True:  # the end of a connection may still be unnoticed by the next request
        stage.submit(call(answers, stop=STOP))
        try:
            channel = stub.channels.get(timeout=1)
            break
        except queue.Empty:
            assert isinstance(answers.get(timeout=60), EngineDeadError)
    assert isinstance(channel.receive(), UnaryStop)
    channel.close()


def test_a_cancelled_request_is_reported(stage: UnaryStage, stub: Stub) -> None:
    answers: Answers = queue.Queue()
    stage.submit(call(answers, gone=True, stop=STOP))
    channel = stub.connected()
    message = channel.receive()
    assert isinstance(message, UnaryStop)
    assert channel.receive() == UnaryCancel(message.number)
    channel.close()


def test_no_engine_stub_is_an_error(stage: UnaryStage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Channel[ToEngineStub, FromEngineStub]:
        raise ConnectionRefusedError

    monkeypatch.setattr(unary, "connect", refuse)
    answers: Answers = queue.Queue()
    stage.submit(call(answers, stop=STOP))
    assert "the model engine is not loaded" in str(answers.get(timeout=60))


def test_a_wrong_request_never_reaches_the_stub(stage: UnaryStage, stub: Stub) -> None:
    answers: Answers = queue.Queue()
    stage.submit(call(answers, text_input=TEXT, stream=np.array([True])))
    stage.submit(replace(call(answers), tensors={}))
    for text in ("stream: must be false", "text_input: is missing"):
        error = answers.get(timeout=60)
        assert isinstance(error, RequestError)
        assert text in str(error)
    assert stub.channels.empty()


def large_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first request count as large: small ones are tokenised beside it."""
    sizes = iter([2**20])
    monkeypatch.setattr(unary, "size_of", lambda tensors: next(sizes, 1))


def test_stop_waits_for_a_large_request_with_its_id(
    stage: UnaryStage, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_first(monkeypatch)
    began, released = threading.Event(), threading.Event()

    def parse_later(*arguments: Any) -> Any:
        began.set()
        assert released.wait(60)
        return parse_inputs(*arguments)

    monkeypatch.setattr(unary, "parse_inputs", parse_later)
    answers: Answers = queue.Queue()
    stage.submit(call(answers, text_input=TEXT, max_tokens=np.array([4])))
    assert began.wait(60)
    stage.submit(call(answers, stop=STOP))
    with pytest.raises(queue.Empty):
        stub.channels.get(timeout=0.5)
    released.set()
    channel = stub.connected()
    assert isinstance(channel.receive(), UnaryRequest)
    assert isinstance(channel.receive(), UnaryStop)
    channel.close()


def test_requests_of_two_threads_share_one_connection(
    stage: UnaryStage, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    large_first(monkeypatch)
    connecting, second_parsed = threading.Event(), threading.Event()

    def connect_later() -> Channel[ToEngineStub, FromEngineStub]:
        connecting.set()
        assert second_parsed.wait(60)
        time.sleep(0.2)  # in which the second thread would connect too
        return stub.connect()

    def parse(*arguments: Any) -> Any:
        if connecting.is_set():
            second_parsed.set()
        return parse_inputs(*arguments)

    monkeypatch.setattr(unary, "connect", connect_later)
    monkeypatch.setattr(unary, "parse_inputs", parse)
    answers: Answers = queue.Queue()
    asked = {"text_input": TEXT, "max_tokens": np.array([4])}
    stage.submit(call(answers, **asked))
    assert connecting.wait(60)
    stage.submit(replace(call(answers, **asked), request_id="other"))
    channel = stub.connected()
    with pytest.raises(queue.Empty):
        stub.channels.get(timeout=0.5)
    assert all(isinstance(channel.receive(), UnaryRequest) for _ in range(2))
    channel.close()


def test_requests_wait_as_their_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = UnaryStage(EngineConfig(tenant_key="k" * 16))
    waiting: list[str] = []

    def put(answer: Any, num_bytes: int, *, tenant: str = "", request_id: str = "") -> None:
        waiting.append(tenant)

    monkeypatch.setattr(TokenizerQueue, "put", lambda self, *args, **named: put(*args, **named))
    answers: Answers = queue.Queue()
    for key in ("k" * 16, "wrong"):
        named = {"tenant": "a", "tenant_key": key}
        stage.submit(replace(call(answers, text_input=TEXT), parameters=named))
    stage.close()
    assert waiting == ["a", ""]
