import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import channel as channel_module
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.messages import Abort, AddRequest, FromEngine, Shutdown, ToEngine
from engine.protocol.token_ids import pack_token_ids

Pair = tuple[Channel, Channel, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    left: Channel = Channel(ours, FromEngine)
    right: Channel = Channel(theirs, ToEngine)
    yield left, right, ours
    left.close()
    right.close()


def test_messages_arrive_in_order_and_typed(pair: Pair) -> None:
    left, right, _ = pair
    add = AddRequest(
        2**63, pack_token_ids([1, 2, 3]), {"stop": ["✂"], "logit_bias": {5: -1.5}}, timeout_s=0.5
    )
    sent = [add, Abort(7), Shutdown()]
    for message in sent:
        left.send(message)
    assert [right.receive() for _ in sent] == sent


def test_a_closed_end_reads_as_none(pair: Pair) -> None:
    left, right, _ = pair
    left.send(Abort(1))
    left.close()
    assert right.receive() == Abort(1)
    assert right.receive() is None
    with pytest.raises(OSError, match="Broken pipe"):
        right.send(Abort(1))


def test_close_wakes_a_receiver_in_another_thread(pair: Pair) -> None:
    _, right, _ = pair
    received: list[object] = ["nothing yet"]
    thread = threading.Thread(target=lambda: received.__setitem__(0, right.receive()))
    thread.start()
    right.close()
    thread.join(timeout=5)
    assert received == [None]


def test_an_end_inside_a_frame_is_an_error(pair: Pair) -> None:
    left, right, raw = pair
    raw.sendall(struct.pack("<I", 100) + b"half")
    left.close()
    with pytest.raises(ChannelError, match="ended inside a frame"):
        right.receive()


def test_frames_are_limited_in_both_directions(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, raw = pair
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ChannelError, match="exceeds the 1000"):
        left.send(AddRequest(1, pack_token_ids([0] * 1001), {}))
    raw.sendall(struct.pack("<I", 1001))
    with pytest.raises(ChannelError, match="limit of 1000"):
        right.receive()


@given(payload=st.binary(max_size=40))
def test_garbage_is_an_error_and_no_other_exception(payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    right: Channel = Channel(theirs, ToEngine)
    ours.sendall(struct.pack("<I", len(payload)) + payload)
    ours.close()
    try:
        assert isinstance(right.receive(), ToEngine)
    except ChannelError:
        pass
    finally:
        right.close()


def test_large_messages_from_several_threads_do_not_mix(pair: Pair) -> None:
    left, right, _ = pair
    messages = [AddRequest(uid, pack_token_ids([uid] * 50_000), {}) for uid in range(4)]
    threads = [threading.Thread(target=left.send, args=(message,)) for message in messages]
    for thread in threads:
        thread.start()
    received = sorted((right.receive() for _ in messages), key=lambda m: m.uid)
    for thread in threads:
        thread.join()
    assert received == messages
