"""The socket of the stage that answers once: its messages, and who may connect."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from engine.service import unary_link
from engine.service.unary_link import (
    ToEngineStub,
    UnaryAnswer,
    UnaryRequest,
    UnaryStop,
    accepted,
    connect,
    listener,
)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    # The name is that of the parent process: of other tests at the same time too.
    address = unary_link._address() + f"-test-{id(monkeypatch)}".encode()
    monkeypatch.setattr(unary_link, "_address", lambda: address)
    with listener() as listening:
        yield listening
        listening.shutdown(socket.SHUT_RDWR)


def test_a_process_with_the_same_parent_is_taken(listening: socket.socket) -> None:
    stage = connect()
    stub = next(accepted(listening))
    stage.send(UnaryStop(1, "a"))
    assert stub.receive() == UnaryStop(1, "a")
    stub.send(UnaryAnswer(1, [], 16))
    assert stage.receive() == UnaryAnswer(1, [], 16)
    stage.close()
    assert stub.receive() is None
    stub.close()


def test_a_process_with_another_parent_is_not(listening: socket.socket) -> None:
    """A child of ours, whose parent is not ours."""
    taken: list[object] = []
    thread = threading.Thread(target=lambda: taken.extend(accepted(listening)))
    thread.start()
    name = listening.getsockname()
    program = (
        "import socket, sys\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(bytes.fromhex(sys.argv[1]))\n"
        "print(s.recv(1))"
    )
    command = [sys.executable, "-c", program, name.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "b''"  # closed at once
    listening.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert taken == []


def test_two_cannot_listen_at_once(listening: socket.socket) -> None:
    with pytest.raises(OSError, match="in use"):
        listener()


def test_a_stage_without_an_engine_stub_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unary_link, "_address", lambda: b"\0trident-unary-nobody")
    with pytest.raises(ConnectionRefusedError):
        connect()


def test_the_inputs_of_a_request_survive_the_way() -> None:
    tensors = {
        "input_ids": np.array([1, 2, 2**31 - 1], dtype=np.int32),
        "sampling_parameters": np.array([b'{"n": 2}'], dtype=object),
        "stream": np.array([False]),
        "priority": np.array([-3], dtype=np.int32),
        "timeout": np.array([2**63], dtype=np.uint64),
        "response_options": np.frombuffer(b"\x93\x90\xa0\xc0", dtype=np.uint8),
    }
    data = msgspec.msgpack.encode(UnaryRequest.of(7, "ü", tensors))
    message = msgspec.msgpack.decode(data, type=ToEngineStub)
    assert isinstance(message, UnaryRequest)
    assert (message.number, message.request_id) == (7, "ü")
    got = message.tensors()
    assert {name: got[name].tolist() for name in got} == {
        name: tensors[name].tolist() for name in got
    }
    assert set(got) == set(tensors) - {"stream"}
