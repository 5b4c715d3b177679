import queue
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.service.link import DetokenizerEnd, EngineEnd, ForgedMessageError

NAME = slice(0, 8)

Heard = queue.Queue[int | tuple[int, str]]


@pytest.fixture
def heard() -> Heard:
    return queue.Queue()


@pytest.fixture
def engine(heard: Heard) -> Iterator[EngineEnd]:
    end = listen(heard)
    yield end
    end.close()


@pytest.fixture
def detokenizer() -> Iterator[DetokenizerEnd]:
    end = DetokenizerEnd()
    yield end
    end.close()


def listen(heard: Heard) -> EngineEnd:
    return EngineEnd(heard.put, lambda uid, error: heard.put((uid, error)), heard.put)


def deaf() -> EngineEnd:
    def fail(*news: object) -> None:
        pytest.fail(f"not mine: {news}")

    return EngineEnd(fail, fail, fail)


def address_of(engine: EngineEnd) -> bytes:
    return b"\0trident-" + engine.seal(b"")[NAME].hex().encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary())
def test_what_the_engine_seals_is_opened(
    engine: EngineEnd, detokenizer: DetokenizerEnd, payload: bytes
) -> None:
    assert bytes(detokenizer.open(memoryview(engine.seal(payload)))) == payload


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.binary(), data=st.data())
def test_no_byte_may_be_changed_added_or_left_out(
    engine: EngineEnd, detokenizer: DetokenizerEnd, payload: bytes, data: st.DataObject
) -> None:
    sealed = engine.seal(payload)
    offset = data.draw(st.integers(0, len(sealed) - 1))
    changed = bytearray(sealed)
    changed[offset] ^= data.draw(st.integers(1, 255))
    for forged in (bytes(changed), sealed + b"\0", sealed[:-1], sealed[:offset]):
        with pytest.raises(ForgedMessageError):
            detokenizer.open(memoryview(forged))


def test_two_messages_make_no_third(engine: EngineEnd, detokenizer: DetokenizerEnd) -> None:
    one, other = engine.seal(b"one"), engine.seal(b"two")
    with pytest.raises(ForgedMessageError):
        detokenizer.open(memoryview(one[:-3] + other[-3:]))
    eight = engine.seal(struct.pack("<Q", 5))  # its MAC is no MAC of a size
    with pytest.raises(ForgedMessageError):
        detokenizer.open(memoryview(eight[:8] + eight[24:40] + eight[24:40] + b"12345"))


def test_a_forged_size_is_refused_before_the_bytes_are_read(
    engine: EngineEnd, detokenizer: DetokenizerEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = engine.seal(b"small")
    detokenizer.open(memoryview(small))
    monkeypatch.delattr("engine.service.link._mac")
    with pytest.raises(ForgedMessageError):
        detokenizer.open(memoryview(small + bytes(1000)))


def test_the_key_of_a_new_engine_is_asked_for(detokenizer: DetokenizerEnd) -> None:
    for _ in range(20):  # more reloads than keys are kept
        engine = deaf()
        message = memoryview(engine.seal(b"x"))
        assert bytes(detokenizer.open(message)) == b"x"
        engine.close()
        assert bytes(detokenizer.open(message)) == b"x"  # what was under way when it ended


def test_an_engine_that_has_gone_is_not_waited_for(heard: Heard) -> None:
    engine, detokenizer = listen(heard), DetokenizerEnd()
    message = memoryview(engine.seal(b"x"))
    engine.close()
    with pytest.raises(ForgedMessageError):
        detokenizer.open(message)
    detokenizer.cancel(message, 3)  # nothing to do, nothing to raise
    detokenizer.close()


def test_engines_have_different_names_and_keys(
    engine: EngineEnd, detokenizer: DetokenizerEnd
) -> None:
    other = deaf()
    assert other.seal(b"x")[NAME] != engine.seal(b"x")[NAME]
    with pytest.raises(ForgedMessageError):
        detokenizer.open(memoryview(engine.seal(b"x")[NAME] + other.seal(b"x")[8:]))
    other.close()


def test_a_cancelled_uid_reaches_the_engine_that_sealed_the_message(
    engine: EngineEnd, detokenizer: DetokenizerEnd, heard: Heard
) -> None:
    other = deaf()
    message = memoryview(engine.seal(b"x"))
    for uid in (0, 1, 2**63 + 5):
        detokenizer.cancel(message, uid)
        assert heard.get(timeout=5) == uid
    other.close()


@pytest.mark.parametrize(
    "error", ["", "internal error", "käputt\n", "x" * 5000, "ä" * 5000, "\ud800"]
)
def test_a_failure_reaches_it_with_the_beginning_of_its_text(
    engine: EngineEnd, detokenizer: DetokenizerEnd, heard: Heard, error: str
) -> None:
    detokenizer.fail(memoryview(engine.seal(b"x")), 2**64 - 1, error)
    got = heard.get(timeout=5)
    assert isinstance(got, tuple)
    uid, text = got
    assert uid == 2**64 - 1
    assert text == error.replace("\ud800", "?") or (len(text) > 1000 and text[:-1] in error)


def test_the_number_of_a_message_that_has_arrived_reaches_it(
    engine: EngineEnd, detokenizer: DetokenizerEnd, heard: Heard
) -> None:
    detokenizer.acknowledge(memoryview(engine.seal(b"x")), 2**63)
    assert heard.get(timeout=5) == 2**63


def test_other_datagrams_are_ignored(
    engine: EngineEnd, detokenizer: DetokenizerEnd, heard: Heard
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as raw:
        for data in (
            b"",
            b"short",
            b"neither a cancellation nor a failure",
            b"c1234567",
            b"x" * 5000,
            bytes(16) + struct.pack("<cQ", b"c", 7),  # as one of its own, with a guess for the MAC
        ):
            raw.sendto(data, address_of(engine))
    detokenizer.cancel(memoryview(engine.seal(b"")), 9)
    assert heard.get(timeout=5) == 9
    assert heard.empty()


STRANGER = """
import sys
from engine.service.link import DetokenizerEnd, ForgedMessageError
import engine.service.link as link
link._KEY_TIMEOUT_S = 0.5
end, message = DetokenizerEnd(), memoryview(bytes.fromhex(sys.argv[1]))
end.cancel(message, 7)
try:
    end.open(message)
except ForgedMessageError:
    print("refused")
"""


def test_a_process_of_another_server_gets_no_key_and_cancels_nothing(
    engine: EngineEnd, detokenizer: DetokenizerEnd, heard: Heard
) -> None:
    message = engine.seal(b"x")
    # Its parent is not ours, as that of a stub of another tritonserver.
    found = subprocess.run(
        [sys.executable, "-c", STRANGER, message.hex()],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
        timeout=60,
    )
    assert found.stdout == "refused\n"
    detokenizer.cancel(memoryview(message), 8)
    assert heard.get(timeout=5) == 8
    assert heard.empty()
