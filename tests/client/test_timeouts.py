"""The limits of a request: in all, between two pieces, and for a connection."""

from __future__ import annotations

import math
import socket
import threading
import time
from typing import Any

import pytest

from client import (
    ConfigurationError,
    InvalidRequestError,
    ReadTimeoutError,
    RequestTimeoutError,
    Timeout,
    UnavailableError,
)
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, Answer, FakeTriton, Piece
from tests.waiting import eventually

SILENT = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]


class TestRead:
    def test_silence_between_two_pieces(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = SILENT
        with connect(triton.url) as client:
            chunks = client.stream("a", timeout=Timeout(read=0.3), request_id="x")
            assert next(chunks).text == "a"
            with pytest.raises(ReadTimeoutError, match=r"no piece of the answer for 0\.3 s"):
                next(chunks)
            assert triton.stopped == {"x"}  # at once, not with the next token
        assert len(triton.requests) == 1  # it is not tried again

    def test_silence_before_the_first_piece(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = SILENT[1:]
        with (
            connect(triton.url, timeout=Timeout(read=0.3)) as client,
            pytest.raises(RequestTimeoutError),
        ):
            client.generate("a")
        assert triton.stopped

    def test_an_answer_may_last_longer(self, triton: FakeTriton, connect: Connect) -> None:
        pieces = [Piece({0: str(number)}, delay_s=0.2) for number in range(8)]
        triton.pieces = [*pieces, Piece({0: "."}, finished=(0,), final=True)]
        with connect(triton.url, timeout=Timeout(read=1.2)) as client:
            completion = client.generate("a")
        assert completion.text == "01234567."
        assert completion.duration > 1.2

    def test_time_of_the_caller_does_not_count(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url, timeout=Timeout(read=1)) as client:
            texts = []
            for chunk in client.stream("a"):
                if not texts:
                    time.sleep(1.5)
                texts.append(chunk.text)
        assert "".join(texts) == "Hello world"

    def test_leaves_no_threads(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url, timeout=Timeout(read=60)) as client:
            client.generate("a")
            chunks = client.stream("a")
            next(chunks)
            chunks.close()  # type: ignore[attr-defined]
        assert eventually(
            lambda: "trident-read-timer" not in {each.name for each in threading.enumerate()}
        )


class TestTotal:
    @pytest.mark.parametrize("of_request", [None, 0.3, Timeout(total=0.3)])
    def test_of_the_request_or_else_of_the_client(
        self, triton: FakeTriton, connect: Connect, of_request: Any
    ) -> None:
        triton.pieces = SILENT
        with (
            connect(triton.url, timeout=0.3 if of_request is None else 60) as client,
            pytest.raises(RequestTimeoutError, match="longer than its timeout"),
        ):
            client.generate("a", timeout=of_request)

    def test_a_number_leaves_the_read_limit(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = SILENT
        with (
            connect(triton.url, timeout=Timeout(read=0.3)) as client,
            pytest.raises(ReadTimeoutError),
        ):
            client.generate("a", timeout=60)

    def test_none_at_all(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url, timeout=0.001) as client:
            assert client.generate("a", timeout=Timeout()).text == "Hello world"
        assert "timeout" not in triton.requests[0]

    @pytest.mark.parametrize("timeout", [math.nan, "1", [1]])
    def test_must_be_a_number(self, triton: FakeTriton, connect: Connect, timeout: Any) -> None:
        with connect(triton.url) as client, pytest.raises(InvalidRequestError, match="timeout: "):
            client.generate("a", timeout=timeout)

    @pytest.mark.parametrize("options", [{"total": 0}, {"read": -1}, {"read": math.nan}])
    def test_must_be_above_zero(self, options: dict[str, float]) -> None:
        (name,) = options
        with pytest.raises(ConfigurationError, match=f"timeout: {name} must be above 0"):
            Timeout(**options)


class TestConnect:
    def test_a_server_that_accepts_and_says_nothing(self, connect: Connect) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"127.0.0.1:{silent.getsockname()[1]}"
            with connect(url, connect_timeout=0.3, retry=None) as client:
                started = time.monotonic()
                with pytest.raises(UnavailableError, match=f"no server answers at {url}"):
                    client.generate("a")
                assert time.monotonic() - started < 4  # 5 s is the default

    @pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf])
    def test_out_of_range(self, connect: Connect, seconds: float) -> None:
        with pytest.raises(ConfigurationError, match="connect_timeout: "):
            connect("localhost:9", connect_timeout=seconds)


def test_a_total_that_strikes_is_told_to_the_server(triton: FakeTriton, connect: Connect) -> None:
    triton.first, triton.pieces = [Answer(SILENT)], HELLO
    total = 0.5
    while not triton.requests:  # it may be over before the server is reached
        with connect(triton.url, timeout=Timeout(total=total, read=20)) as client:
            with pytest.raises(RequestTimeoutError) as caught:
                client.generate("a")
            assert not isinstance(caught.value, ReadTimeoutError)
        total *= 2
    assert triton.cancelled.wait(60)
    assert triton.requests[0]["timeout"] > 0.5e6
