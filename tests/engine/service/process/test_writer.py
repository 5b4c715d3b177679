import socket
from collections.abc import Iterator

import pytest

from engine.protocol import FromEngine, Outputs, SequenceOutput, Starting, ToEngine
from engine.service import channel
from engine.service.channel import Channel
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
