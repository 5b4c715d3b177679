import fcntl
import socket
import struct
import termios
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import channel
from engine.protocol.channel import Channel
from engine.protocol.messages import FromEngine, Outputs, SequenceOutput, Starting, ToEngine
from engine.protocol.step_outputs import StepOutputs
from engine.service.process import serve
from engine.service.process.serve import Writer
from tests.waiting import eventually


@pytest.fixture
def ends() -> Iterator[tuple[Channel[FromEngine, ToEngine], Channel[ToEngine, FromEngine]]]:
    ours, theirs = socket.socketpair()
    writing: Channel[FromEngine, ToEngine] = Channel(ours, ToEngine)
    reading: Channel[ToEngine, FromEngine] = Channel(theirs, FromEngine)
    yield writing, reading
    writing.close()
    reading.close()


def output(uid: int, num_tokens: int) -> SequenceOutput:
    return SequenceOutput(uid, 0, [70_000] * num_tokens, [uid])


def test_outputs_that_exceed_a_frame_go_in_several(
    ends: tuple[Channel[FromEngine, ToEngine], Channel[ToEngine, FromEngine]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are what a stub that was held up for long has left to be sent."""
    monkeypatch.setattr(channel, "MAX_FRAME_BYTES", 2000)
    writing, reading = ends
    writer = Writer(writing)
    sent = [output(uid, 100) for uid in range(20)]
    writer.put(StepOutputs.of(sent[:7]))
    writer.put(StepOutputs.of(sent[7:]))
    writer.put(Starting("last"))
    received: list[SequenceOutput] = []
    num_frames = 0
    while isinstance(message := reading.receive(), Outputs):
        received += StepOutputs.parse(message).rows()
        num_frames += 1
    assert message == Starting("last")
    assert received == sent
    assert num_frames > 1
    writer.close()


def test_outputs_of_fast_steps_share_a_frame_with_a_row_per_sequence(
    ends: tuple[Channel[FromEngine, ToEngine], Channel[ToEngine, FromEngine]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "_INTERVAL_PER_ROW_S", 3600.0)
    monkeypatch.setattr(serve, "_MOST_INTERVAL_S", 3600.0)
    writing, reading = ends
    writer = Writer(writing)
    writer.put(StepOutputs.of([output(1, 1)]))
    first = reading.receive()
    assert isinstance(first, Outputs)  # at once
    for _ in range(3):
        writer.put(StepOutputs.of([output(1, 2), output(2, 1)]))
    writer.put(Starting("something else"))
    together = reading.receive()
    assert isinstance(together, Outputs)
    assert list(StepOutputs.parse(together).rows()) == [output(1, 6), output(2, 3)]
    assert reading.receive() == Starting("something else")
    writer.close()


def num_unread(reading: Channel[ToEngine, FromEngine]) -> int:
    """Return the bytes in its socket."""
    size = fcntl.ioctl(reading._socket, termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", size)[0])


def test_outputs_go_out_before_put_returns(
    ends: tuple[Channel[FromEngine, ToEngine], Channel[ToEngine, FromEngine]],
) -> None:
    """Once its thread is idle: a thread that is woken for them would delay the next step."""
    writing, reading = ends
    writer = Writer(writing)
    writer.put(Starting("a message of the thread"))
    assert reading.receive() == Starting("a message of the thread")
    assert eventually(lambda: writer._is_idle)
    for uid in range(3):
        time.sleep(serve._INTERVAL_PER_ROW_S)
        before = num_unread(reading)
        writer.put(StepOutputs.of([output(uid, 1)]))
        assert num_unread(reading) > before
    writer.close()


@given(steps=st.lists(st.integers(min_value=0, max_value=30_000), min_size=1, max_size=20))
@settings(max_examples=30, deadline=None)
def test_put_never_waits_and_nothing_changes_places(steps: list[int]) -> None:
    """Whatever is in the socket, which nobody reads until all is put."""
    ours, theirs = socket.socketpair()
    writing: Channel[FromEngine, ToEngine] = Channel(ours, ToEngine)
    reading: Channel[ToEngine, FromEngine] = Channel(theirs, FromEngine)
    writer = Writer(writing)
    sent: list[int] = []
    for step, num_tokens in enumerate(steps):
        token_ids = [step] * num_tokens
        sent += token_ids
        writer.put(StepOutputs.of([SequenceOutput(1, 0, token_ids, [])]))
    writer.put(Starting("last"))
    received: list[int] = []
    while isinstance(message := reading.receive(), Outputs):
        for row in StepOutputs.parse(message).rows():
            received += row.token_ids
    assert received == sent
    writer.close()
    writing.close()
    reading.close()
