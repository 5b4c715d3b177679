"""Attempts whose connection is lost: the server is told to end them, in the right order."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from client import AsyncTridentClient, QueueFullError, RetryPolicy, UnavailableError, aio_transport
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, Answer, FakeTriton, Piece
from tests.client.proxy import proxy
from tests.waiting import eventually

QUICK = RetryPolicy(attempts=4, first_delay_s=0.05, factor=2, max_delay_s=0.2)
SLOW = [Piece({0: "never"}, delay_s=30)]


def _wait_for_a_request(triton: FakeTriton) -> None:
    assert eventually(lambda: triton.requests)


def _order(triton: FakeTriton) -> list[str]:
    return ["stop" if "stop" in call.inputs else "request" for call in triton.calls]


@pytest.mark.parametrize("request_id", ["", "mine"], ids=["own id", "id of the caller"])
def test_a_cut_connection(triton: FakeTriton, connect: Connect, request_id: str) -> None:
    triton.first, triton.pieces = [Answer(SLOW)], HELLO
    with proxy(triton.url) as between, connect(between.url, retry=QUICK) as client:

        def cut() -> None:
            _wait_for_a_request(triton)
            between.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        assert client.generate("a", request_id=request_id).text == "Hello world"
        cutting.join()
    assert _order(triton) == ["request", "stop", "request"]
    assert len({call.request_id for call in triton.calls}) == 1
    assert triton.stopped == {request_id or triton.calls[0].request_id}


def test_cut_while_the_request_is_sent(triton: FakeTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    triton.pieces = HELLO

    async def main() -> None:
        with proxy(triton.url) as between:
            held_open = aio_transport._held_open

            async def cut_before(*args: Any) -> AsyncIterator[Any]:
                async for message in held_open(*args):
                    monkeypatch.undo()
                    between.cut()
                    time.sleep(0.1)  # before the loop hears of it
                    yield message

            # Sometimes gRPC has the status of the connection by then.
            for retry in (None, QUICK) * 5:
                async with AsyncTridentClient(between.url, retry=retry) as client:
                    assert (await client.generate("a")).text == "Hello world"
                    monkeypatch.setattr(aio_transport, "_held_open", cut_before)
                    if retry is None:
                        with pytest.raises(UnavailableError, match="unavailable"):
                            await client.generate("a")
                    else:
                        assert (await client.generate("a")).text == "Hello world"

    asyncio.run(main())


def test_a_stream_that_ends_with_nothing(triton: FakeTriton, connect: Connect) -> None:
    triton.first, triton.pieces = [Answer([Piece(None)])], HELLO
    with connect(triton.url, retry=QUICK) as client:
        assert client.generate("a").text == "Hello world"
    assert _order(triton) == ["request", "stop", "request"]


def test_cut_when_the_answer_had_begun(triton: FakeTriton, connect: Connect) -> None:
    triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
    with proxy(triton.url) as between, connect(between.url, retry=QUICK) as client:
        chunks = client.stream("a")
        assert next(chunks).text == "a"
        between.cut()
        with pytest.raises(UnavailableError):
            next(chunks)
    assert _order(triton) == ["request", "stop"]
    assert triton.cancelled.wait(60)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(error_message="the engine process has died; the request is lost [code=unavailable]"),
        Answer(error_message="Maximum queue size of 3 requests reached"),
        Answer(error=(grpc.StatusCode.UNAVAILABLE, "Maximum queue size of 3 requests reached")),
    ],
    ids=["died", "full", "full by status"],
)
def test_what_the_server_has_refused_is_not_withdrawn(
    triton: FakeTriton, connect: Connect, answer: Answer
) -> None:
    triton.first, triton.pieces = [answer], HELLO
    with connect(triton.url, retry=QUICK) as client:
        assert client.generate("a").text == "Hello world"
    assert _order(triton) == ["request", "request"]


def test_what_was_never_sent_is_not_withdrawn(connect: Connect) -> None:
    with connect("localhost:9", retry=QUICK) as client:
        started = time.monotonic()
        with pytest.raises(UnavailableError, match="no server answers"):
            client.generate("a")
        assert time.monotonic() - started < 20


def test_a_server_that_cannot_end_requests_gets_the_next_attempt_all_the_same(
    triton: FakeTriton, connect: Connect
) -> None:
    unknown = Answer(error_message="unexpected inference input 'stop' for model 'ensemble'")
    triton.first, triton.pieces = [Answer([Piece(None)])], HELLO
    triton.stop_answer = unknown
    with connect(triton.url, retry=QUICK) as client:
        assert client.generate("a").text == "Hello world"
    assert _order(triton) == ["request", "stop", "request"]


def test_no_next_attempt_while_the_withdrawal_is_not_answered(
    triton: FakeTriton, connect: Connect
) -> None:
    triton.first, triton.pieces = [Answer([Piece(None)])], HELLO
    triton.stop_answer = Answer(error_message="Maximum queue size of 3 requests reached")
    with connect(triton.url, retry=QUICK) as client, pytest.raises(QueueFullError):
        client.generate("a")
    assert len(triton.requests) == 1
