import socket
from collections.abc import Iterator

import pytest

from engine.protocol import FromEngine, Outputs, SequenceOutput, Starting, ToEngine
from engine.service import channel
from engine.service.channel import Channel
from engine.service.process import writer as writer_module
from engine.service.process.writer import Writer
from engine.step_outputs import StepOutputs


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
    monkeypatch.setattr(writer_module, "_INTERVAL_PER_ROW_S", 3600.0)
    monkeypatch.setattr(writer_module, "_MOST_INTERVAL_S", 3600.0)
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
