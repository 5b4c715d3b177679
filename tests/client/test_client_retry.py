"""Both clients when the server is away, full or late: real sockets, a scripted server."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import grpc
import pytest

from client import AsyncTridentClient, RetryPolicy, TridentClient
from client.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    UnavailableError,
)
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, Answer, FakeTriton, Piece, serve
from tests.waiting import eventually

QUICK = RetryPolicy(attempts=4, first_delay_s=0.05, factor=2, max_delay_s=0.2)
GONE = "in ensemble 'ensemble', the engine process has died; the request is lost [code=unavailable]"
FULL = "in ensemble 'ensemble', Maximum queue size of 3 requests reached [code=queue_full]"


@pytest.fixture
def free_url() -> Iterator[str]:
    """An address where nobody listens; the port stays ours until the test ends."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield f"localhost:{holder.getsockname()[1]}"


class TestBeforeTheFirstChunk:
    @pytest.mark.parametrize(
        "failure",
        [
            Answer(error_message=GONE),
            Answer(error_message=FULL),
            Answer(error=(grpc.StatusCode.UNAVAILABLE, "the engine process is being restarted")),
            Answer(pieces=[Piece(None)]),  # a stream that ends with nothing
        ],
        ids=["died", "full", "status", "ended"],
    )
    def test_is_tried_again(self, triton: FakeTriton, connect: Connect, failure: Answer) -> None:
        triton.first, triton.pieces = [failure, failure], HELLO
        with connect(triton.url, retry=QUICK) as client:
            completion = client.generate("a", seed=1, request_id="x")
        assert completion.text == "Hello world"
        assert len(triton.requests) == 3
        assert triton.requests[0] == triton.requests[1] == triton.requests[2]
        assert {call.request_id for call in triton.calls} == {"x"}

    def test_is_tried_again_after_pauses(self, triton: FakeTriton, connect: Connect) -> None:
        triton.first, triton.pieces = [Answer(error_message=FULL)] * 2, HELLO
        policy = RetryPolicy(first_delay_s=0.1, factor=3, jitter=0)
        with connect(triton.url, retry=policy) as client:
            client.generate("a")
        first, second, third = (call.time for call in triton.calls)
        assert second - first >= 0.1
        assert third - second >= 0.3

    def test_is_given_up_after_the_last_attempt(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = FULL
        with (
            connect(triton.url, retry=QUICK) as client,
            pytest.raises(QueueFullError, match="Maximum queue size of 3"),
        ):
            client.generate("a")
        assert len(triton.requests) == QUICK.attempts

    def test_is_tried_once_if_switched_off(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = GONE
        with connect(triton.url, retry=None) as client, pytest.raises(UnavailableError):
            client.generate("a")
        assert len(triton.requests) == 1

    def test_what_is_wrong_is_tried_once(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = "in ensemble 'ensemble', top_p: no [code=invalid_value]"
        with connect(triton.url, retry=QUICK) as client, pytest.raises(InvalidRequestError):
            client.generate("a")
        assert len(triton.requests) == 1


class TestAfterTheFirstChunk:
    @pytest.mark.parametrize(
        "failure",
        [
            Answer(HELLO[:1], error_message=GONE),
            Answer(HELLO[:1], error=(grpc.StatusCode.UNAVAILABLE, "gone")),
            Answer(HELLO[:1]),
        ],
        ids=["died", "status", "ended"],
    )
    def test_is_never_tried_again(
        self, triton: FakeTriton, connect: Connect, failure: Answer
    ) -> None:
        triton.first, triton.pieces = [failure], HELLO
        with connect(triton.url, retry=QUICK) as client:
            chunks = client.stream("a")
            assert next(chunks).text == "Hel"
            with pytest.raises(UnavailableError):
                next(chunks)
        assert len(triton.requests) == 1


class TestDeadline:
    def test_is_shared_by_the_attempts(self, triton: FakeTriton, connect: Connect) -> None:
        slow_failure = Answer([Piece(None, delay_s=0.3)], error_message=GONE)
        triton.first, triton.pieces = [slow_failure] * 2, HELLO
        with connect(triton.url, retry=QUICK) as client:
            client.generate("a", timeout=9)
        of_server = [request["timeout"] / 1e6 for request in triton.requests]
        assert of_server[0] - of_server[1] >= 0.3
        assert of_server[1] - of_server[2] >= 0.3
        of_grpc = [call.seconds or 0 for call in triton.calls]  # which rounds to some 100 ms
        assert of_grpc[0] - of_grpc[2] >= 0.3
        # The server's own deadline is for clients that vanish: it comes after the client's.
        assert 9 < of_server[0] <= 10

    def test_ends_the_attempts(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = FULL
        policy = RetryPolicy(attempts=1000, first_delay_s=0.1, factor=1, jitter=0)
        started = time.monotonic()
        with connect(triton.url, retry=policy) as client:
            client.is_ready()  # the connection is there
            with pytest.raises((QueueFullError, RequestTimeoutError)):
                client.generate("a", timeout=0.5)
        assert time.monotonic() - started < 5
        assert len(triton.calls) <= 1 + 5

    def test_leaves_no_time_for_a_long_pause(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = FULL
        started = time.monotonic()
        policy = RetryPolicy(first_delay_s=30, max_delay_s=30, jitter=0)
        with connect(triton.url, retry=policy) as client, pytest.raises(QueueFullError):
            client.generate("a", timeout=25)
        assert time.monotonic() - started < 10

    def test_strikes_during_the_second_attempt(self, triton: FakeTriton, connect: Connect) -> None:
        triton.first = [Answer(error_message=GONE)]
        triton.pieces = [Piece({0: "a"}, delay_s=30)]
        with connect(triton.url, retry=QUICK) as client:
            with pytest.raises(RequestTimeoutError):
                client.generate("a", timeout=1)
            assert triton.cancelled.wait(60)
        assert len(triton.requests) == 2


class TestServerThatIsAway:
    def test_refused_then_there(self, connect: Connect, free_url: str) -> None:
        triton = FakeTriton(pieces=HELLO)
        servers: list[grpc.Server] = []
        timer = threading.Timer(0.5, lambda: servers.append(serve(triton, free_url)[0]))
        timer.start()
        with connect(free_url, retry=RetryPolicy(attempts=30, factor=1)) as client:
            assert client.generate("a", timeout=20).text == "Hello world"
        timer.join()
        servers[0].stop(grace=None).wait()

    def test_restarted_between_requests(self, connect: Connect) -> None:
        triton = FakeTriton(pieces=HELLO)
        server, url = serve(triton)
        with connect(url, retry=RetryPolicy(attempts=30, factor=1)) as client:
            assert client.generate("a").text == "Hello world"
            server.stop(grace=None).wait()
            with pytest.raises(UnavailableError):
                client.health()
            time.sleep(0.5)
            server, _ = serve(triton, url)
            assert client.generate("a", timeout=20).text == "Hello world"
        server.stop(grace=None).wait()

    @pytest.mark.slow
    def test_is_found_again_soon(self, connect: Connect, free_url: str) -> None:
        with connect(free_url, retry=None) as client:
            until = time.monotonic() + 3  # in which gRPC's back-off would grow beyond its bound
            while time.monotonic() < until:
                assert not client.is_ready()
                time.sleep(0.1)
            server, _ = serve(FakeTriton(), free_url)
            started = time.monotonic()
            assert eventually(client.is_ready, 10)
            # Unbounded, it would be near 2 s by now, and up to 120 s later on.
            assert time.monotonic() - started < 3
        server.stop(grace=None).wait()

    def test_stopped_before_the_first_chunk(self, connect: Connect) -> None:
        triton = FakeTriton(pieces=[Piece({0: "never"}, delay_s=30)])
        server, url = serve(triton)
        following: list[grpc.Server] = []

        def restart() -> None:
            assert eventually(lambda: triton.requests)
            server.stop(grace=None).wait()
            following.append(serve(FakeTriton(pieces=HELLO), url)[0])

        thread = threading.Thread(target=restart)
        thread.start()
        with connect(url, retry=RetryPolicy(attempts=30, factor=1)) as client:
            assert client.generate("a", timeout=20).text == "Hello world"
        thread.join()
        following[0].stop(grace=None).wait()


def test_closing_the_client_ends_the_pause(triton: FakeTriton) -> None:
    triton.error_message = FULL
    client = TridentClient(triton.url, retry=RetryPolicy(first_delay_s=60, max_delay_s=60))
    threading.Timer(0.5, client.close).start()
    started = time.monotonic()
    with pytest.raises(RequestCancelledError):
        client.generate("a")
    assert time.monotonic() - started < 20


def test_a_closed_client_says_so(triton: FakeTriton) -> None:
    client = TridentClient(triton.url)
    client.close()
    with pytest.raises(RequestCancelledError):
        client.generate("a")


def test_a_closed_async_client_says_so(triton: FakeTriton) -> None:
    async def run() -> None:
        client = AsyncTridentClient(triton.url)
        await client.close()
        await client.generate("a")

    with pytest.raises(RequestCancelledError):
        asyncio.run(run())
