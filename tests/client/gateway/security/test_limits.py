"""Sizes and times of requests, over raw sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from client.gateway.security.body_limits import MAX_BODY_BYTES, MAX_HEAD_BYTES, BodyLimits
from client.gateway.security.http_protocol import BoundedHttpProtocol

QUICK_S = 0.4
HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\n"


class Quick(BoundedHttpProtocol):
    HEAD_TIMEOUT_S = QUICK_S
    LINGER_S = QUICK_S


# Set when a request for /left is told that its connection has ended.
LEFT = threading.Event()


async def _length(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the length of the body, late for the path /slow, never for /left."""
    message = await receive()
    assert not message["more_body"]
    if scope["path"] == "/left":
        assert (await receive())["type"] == "http.disconnect"
        LEFT.set()
        return
    if scope["path"] == "/slow":
        await asyncio.sleep(1.5 * QUICK_S)
    body = str(len(message["body"])).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    config = uvicorn.Config(
        BodyLimits(_length, timeout=QUICK_S), http=Quick, log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()
        server.should_exit = True
        thread.join()


@pytest.fixture
def peer(address: tuple[str, int]) -> Iterator[socket.socket]:
    with closing(socket.create_connection(address, timeout=10)) as peer:
        yield peer


def _answer(peer: socket.socket) -> bytes:
    """Return all that comes until the end of an answer's body, or of the connection."""
    received = b""
    while True:
        head, separator, body = received.partition(b"\r\n\r\n")
        if separator:
            fields = dict(line.split(b": ") for line in head.lower().split(b"\r\n")[1:])
            if len(body) >= int(fields.get(b"content-length", b"0")):
                return received
        if not (more := peer.recv(65536)):
            return received
        received += more


def _ends(peer: socket.socket) -> bool:
    """Whether the connection ends soon."""
    try:
        return peer.recv(65536) == b""
    except ConnectionResetError:
        return True


def _send_until_cut_off(peer: socket.socket, piece: bytes, pause: float = 0.0) -> float:
    """Send a piece again and again; return after how many seconds the other side had enough."""
    started = time.monotonic()
    try:
        while (seconds := time.monotonic() - started) < 10:
            peer.sendall(piece)
            time.sleep(pause)
    except OSError:
        pass
    return seconds


class TestHead:
    def test_an_endless_one_ends(self, peer: socket.socket) -> None:
        peer.sendall(HEAD)
        assert _send_until_cut_off(peer, b"a: " + b"b" * 8000 + b"\r\n") < 5

    def test_one_endless_line_ends(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"a: " + b"b" * (MAX_HEAD_BYTES + 1))
        assert _answer(peer).startswith(b"HTTP/1.1 431 ")

    @pytest.mark.parametrize("size", [100_000, 1_000_000])
    def test_a_complete_one_that_is_too_long_is_refused(
        self, peer: socket.socket, size: int
    ) -> None:
        peer.sendall(HEAD + b"a: " + b"b" * size + b"\r\nContent-Length: 0\r\n\r\n")
        assert _answer(peer).startswith(b"HTTP/1.1 431 ")

    def test_a_long_one_is_taken(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"a: " + b"b" * 60_000 + b"\r\nContent-Length: 2\r\n\r\n{}")
        assert _answer(peer).endswith(b"\r\n\r\n2")

    def test_a_long_address_is_refused(self, peer: socket.socket) -> None:
        peer.sendall(b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _answer(peer).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))

    def test_a_connection_without_one_ends_in_silence(self, peer: socket.socket) -> None:
        started = time.monotonic()
        assert _answer(peer) == b""
        assert time.monotonic() - started < 10 * QUICK_S

    @pytest.mark.parametrize("begun", [b"G", HEAD], ids=["letter", "half"])
    def test_a_slow_one_ends(self, peer: socket.socket, begun: bytes) -> None:
        started = time.monotonic()
        peer.sendall(begun)
        assert _answer(peer).startswith(b"HTTP/1.1 408 ")
        assert _ends(peer)
        assert time.monotonic() - started < 10 * QUICK_S

    def test_one_letter_at_a_time_ends(self, peer: socket.socket) -> None:
        assert _send_until_cut_off(peer, b"a", pause=0.02) < 10 * QUICK_S

    def test_the_second_on_a_connection_is_bounded_too(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"Content-Length: 2\r\n\r\n{}")
        assert _answer(peer).endswith(b"\r\n\r\n2")
        peer.sendall(HEAD)
        assert _answer(peer).startswith(b"HTTP/1.1 408 ")
        assert _ends(peer)


class TestBody:
    def test_the_largest_is_taken(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + f"Content-Length: {MAX_BODY_BYTES}\r\n\r\n".encode())
        peer.sendall(b"x" * MAX_BODY_BYTES)
        assert _answer(peer).endswith(f"\r\n\r\n{MAX_BODY_BYTES}".encode())

    def test_a_larger_one_is_refused_before_it_comes(self, peer: socket.socket) -> None:
        peer.sendall(
            HEAD + f"Expect: 100-continue\r\nContent-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode()
        )
        assert _answer(peer).startswith(b"HTTP/1.1 413 ")

    def test_who_sends_it_all_first_still_reads_the_answer(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + f"Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        peer.sendall(b"x" * (MAX_BODY_BYTES + 1))
        assert _answer(peer).startswith(b"HTTP/1.1 413 ")

    def test_an_endless_one_ends(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        assert _send_until_cut_off(peer, b"10000\r\n" + b"x" * 0x10000 + b"\r\n") < 5

    def test_one_that_is_too_large_in_chunks_is_refused(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(MAX_BODY_BYTES // 0x10000 + 1):
            peer.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        peer.sendall(b"0\r\n\r\n")
        assert _answer(peer).startswith(b"HTTP/1.1 413 ")

    def test_a_slow_one_is_refused(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"Content-Length: 100\r\n\r\n{")
        started = time.monotonic()
        answer = _answer(peer)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body did not arrive within 0.4 s" in answer
        assert _ends(peer)
        assert time.monotonic() - started < 10 * QUICK_S

    def test_a_slow_answer_is_waited_for(self, peer: socket.socket) -> None:
        request = b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
        for _ in range(2):
            peer.sendall(request)
            assert _answer(peer).endswith(b"\r\n\r\n2")

    def test_a_nonsensical_length_is_refused(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n")
        assert _answer(peer).startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 "))


class TestOffersOfAnotherProtocol:
    """Java's client offers HTTP/2 with its first request, and its answers are read all the same."""

    OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEA\r\n"

    def test_the_request_is_answered_and_the_next_one_too(self, peer: socket.socket) -> None:
        for body in (b"{}", b"[1]"):
            length = b"Content-Length: %d\r\n\r\n" % len(body)
            peer.sendall(HEAD + self.OFFER + length + body)
            assert _answer(peer).endswith(b"\r\n\r\n%d" % len(body))

    def test_bodies_may_come_later_and_in_chunks(self, peer: socket.socket) -> None:
        peer.sendall(HEAD + self.OFFER + b"Transfer-Encoding: chunked\r\n\r\n")
        time.sleep(0.05)
        peer.sendall(b"2\r\n{}\r\n0\r\n\r\n")
        assert _answer(peer).endswith(b"\r\n\r\n2")

    def test_many_at_once_are_read_one_after_another(self, peer: socket.socket) -> None:
        number = 2000
        peer.sendall((b"GET / HTTP/1.1\r\nHost: a\r\n" + self.OFFER + b"\r\n") * number)
        answers = b""
        while answers.count(b"HTTP/1.1 200 ") < number:
            answers += (more := peer.recv(65536))
            assert more

    def test_a_tunnel_is_none(self, peer: socket.socket) -> None:
        peer.sendall(b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n")
        assert _answer(peer).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("number", [0, 1, Quick.MAX_PIPELINED])
def test_a_client_that_goes_is_noticed_with_others_of_its_requests_waiting(
    peer: socket.socket, number: int
) -> None:
    LEFT.clear()
    rest = b"Host: a\r\nContent-Length: 2\r\n\r\n{}"
    peer.sendall(b"POST /left HTTP/1.1\r\n" + rest + (b"POST /x HTTP/1.1\r\n" + rest) * number)
    assert not LEFT.wait(0.1)
    peer.close()
    assert LEFT.wait(60)


class Held:
    """Requests whose bodies come in pieces, to an application that answers when it is told to."""

    def __init__(self, max_buffered_bytes: int) -> None:
        self._limits = BodyLimits(self._answer, max_buffered_bytes=max_buffered_bytes)
        self.go_on = asyncio.Event()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await self.go_on.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, size: int, *, is_whole: bool = True) -> tuple[int, dict[bytes, bytes]]:
        """Return status and headers of the answer to a body of a size."""
        pieces = [b"x" * 2**14] * (size // 2**14)
        messages = iter([{"type": "http.request", "body": p, "more_body": True} for p in pieces])
        sent: list[Message] = []

        async def receive() -> Message:
            if (message := next(messages, None)) is not None:
                return message
            if not is_whole:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/", "headers": [], "state": {}}
        await self._limits(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"])


@pytest.mark.parametrize("is_whole", [False, True])
def test_bodies_of_all_connections_are_bounded_together(is_whole: bool) -> None:
    async def episode() -> None:
        held = Held(max_buffered_bytes=2**20)
        # With 64 KiB each that do not count: 512 KiB and 448 KiB do.
        sizes = (2**19 + 2**16, 2**19)
        others = [asyncio.create_task(held.ask(size, is_whole=is_whole)) for size in sizes]
        await asyncio.sleep(0)
        status, headers = await held.ask(2**18)
        assert (status, headers[b"retry-after"]) == (503, b"1")
        fits = asyncio.create_task(held.ask(2**17))
        small = [asyncio.create_task(held.ask(2**16)) for _ in range(50)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in (*others, fits, *small))
        if is_whole:
            held.go_on.set()
            found = await asyncio.gather(*others, fits, *small)
            assert {status for status, _ in found} == {200}
        for each in (*others, fits, *small):
            each.cancel()
        await asyncio.gather(*others, fits, *small, return_exceptions=True)
        held.go_on.set()
        assert (await held.ask(2**20))[0] == 200  # all of it is free again

    asyncio.run(episode())
