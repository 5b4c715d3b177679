"""Streams: what is particular to each of the two clients, their ends before the end above all."""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import aclosing, suppress
from typing import Any

import grpc
import pytest

from client import AsyncTridentClient, Chunk, Completion, RetryPolicy, TridentClient
from client.errors import RequestCancelledError, UnavailableError
from client.response import read_chunks
from tests.client.fake_triton import HELLO, FakeTriton, Piece
from tests.waiting import eventually

# Programs that end with a stream open.
HELD = """
import sys
from client import TridentClient
chunks = TridentClient(sys.argv[1]).stream("a")
print(next(chunks).text)
"""
READ_BY_A_DAEMON = """
import sys, threading
from client import TridentClient
begun = threading.Event()
def read():
    for chunk in TridentClient(sys.argv[1]).stream("a"):
        print(chunk.text, flush=True)
        begun.set()
threading.Thread(target=read, daemon=True).start()
begun.wait()
"""


class TestSyncStream:
    def test_yields_typed_chunks(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        with TridentClient(triton.url) as client:
            chunks = list(client.stream("a"))
        assert chunks[0] == Chunk("Hel", 0, None, 1, 7)
        assert chunks[-1] == Chunk("ld", 0, "stop", 1, 7)

    def test_leaving_the_loop_cancels(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        with TridentClient(triton.url) as client:
            for _ in client.stream("a"):
                break
            assert triton.cancelled.wait(60)

    def test_leaving_the_loop_takes_the_request_back(self, triton: FakeTriton) -> None:
        """A cancelled call alone is noticed only when the engine answers next."""
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        with TridentClient(triton.url) as client:
            for _ in client.stream("a"):
                break
            assert triton.stopped == {triton.calls[0].request_id}

    def test_an_id_of_the_caller_is_taken_back_too(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        with TridentClient(triton.url) as client:
            for _ in client.stream("a", request_id="1"):
                break
            assert triton.stopped == {"1"}

    def test_a_finished_request_is_not_taken_back(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        with TridentClient(triton.url) as client:
            chunks = client.stream("a")
            for chunk in chunks:
                if chunk.finish_reason:
                    break
            chunks.close()
            assert not triton.stopped

    def test_closing_the_client_cancels(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        client = TridentClient(triton.url)
        chunks = client.stream("a")
        next(chunks)
        threading.Timer(0.1, client.close).start()
        with pytest.raises(RequestCancelledError):
            next(chunks)

    @pytest.mark.parametrize("script", [HELD, READ_BY_A_DAEMON], ids=["held", "read by a daemon"])
    def test_a_program_may_end_with_a_stream_open(self, triton: FakeTriton, script: str) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        command = [sys.executable, "-c", script, triton.url]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=15, check=True)
        assert (ended.stdout, ended.stderr) == ("a\n", "")
        assert triton.cancelled.wait(60)

    def test_many_threads_share_a_client(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        texts: list[str] = []
        with TridentClient(triton.url) as client:
            client.generate("a")
            threads = [
                threading.Thread(target=lambda: texts.append(client.generate("a").text))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert texts == ["Hello world"] * 8
        assert triton.num_config_calls == 1

    def test_leaves_no_threads(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        _generate(triton.url)  # whatever gRPC starts once
        before = _client_threads()
        for _ in range(5):
            _generate(triton.url)
        assert eventually(lambda: len(_client_threads()) <= len(before))


def _generate(url: str) -> None:
    with TridentClient(url) as client:
        client.generate("a")


def _client_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "ThreadPoolExecutor" not in t.name]


class TestAsyncStream:
    def test_large_response_is_read_beside_the_event_loop(
        self, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        readers: dict[int, threading.Thread] = {}

        def note(found: Any) -> Any:
            readers[found.ByteSize()] = threading.current_thread()
            return read_chunks(found)

        monkeypatch.setattr("client.response.read_chunks", note)
        triton.pieces = [Piece({0: "a" * 2**18}), Piece({0: "b"}, (0,), final=True)]

        async def run() -> Completion:
            async with AsyncTridentClient(triton.url) as client:
                return await client.generate("a")

        assert asyncio.run(run()).text == "a" * 2**18 + "b"
        small, large = (readers[size] for size in sorted(readers))
        assert small is threading.main_thread() is not large

    def test_answers_requests_side_by_side(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, (0,), final=True, delay_s=0.3)]

        async def run() -> list[Completion]:
            async with AsyncTridentClient(triton.url) as client:
                return await asyncio.gather(*(client.generate("a") for _ in range(8)))

        completions = asyncio.run(run())
        assert [each.text for each in completions] == ["ab"] * 8
        assert max(each.duration for each in completions) < 8 * 0.3

    def test_leaving_the_loop_cancels(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> bool:
            async with AsyncTridentClient(triton.url) as client:
                async for _ in client.stream("a"):
                    break
                return await asyncio.to_thread(triton.cancelled.wait, 5)

        assert asyncio.run(run())

    def test_closing_the_stream_cancels_at_once(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> bool:
            async with AsyncTridentClient(triton.url) as client:
                async with aclosing(client.stream("a")) as chunks:
                    await anext(chunks)
                return await asyncio.to_thread(triton.cancelled.wait, 5)

        assert asyncio.run(run())

    def test_cancelling_the_task_takes_back_a_request_that_waits(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}, delay_s=30)]

        async def run() -> None:
            async with AsyncTridentClient(triton.url) as client:
                task = asyncio.create_task(client.generate("a"))
                assert await asyncio.to_thread(eventually, lambda: triton.requests)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert triton.stopped == {triton.calls[0].request_id}

        asyncio.run(run())

    def test_cancelling_the_task_cancels_the_request(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> bool:
            async with AsyncTridentClient(triton.url) as client:
                task = asyncio.create_task(client.generate("a"))
                assert await asyncio.to_thread(eventually, lambda: triton.requests)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return await asyncio.to_thread(triton.cancelled.wait, 5)

        assert asyncio.run(run())

    def test_failed_attempts_leave_no_tasks(self, triton: FakeTriton) -> None:
        triton.error = (grpc.StatusCode.UNAVAILABLE, "away")
        retry = RetryPolicy(attempts=3, first_delay_s=0.01)

        async def run() -> set[Any]:
            async with AsyncTridentClient(triton.url, retry=retry) as client:
                with suppress(UnavailableError):
                    await client.generate("a")
                deadline = time.monotonic() + 60
                while len(asyncio.all_tasks()) > 1 and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
                return asyncio.all_tasks() - {asyncio.current_task()}

        assert not asyncio.run(run())
        # The request, then its withdrawal, tried three times: before each further attempt, and at
        # the end.
        assert [call.inputs.get("stop", False) for call in triton.calls] == [False, *[True] * 9]

    def test_closing_the_client_is_no_task_cancellation(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> None:
            client = AsyncTridentClient(triton.url)
            task = asyncio.create_task(client.generate("a"))
            assert await asyncio.to_thread(eventually, lambda: triton.requests)
            await client.close()
            with pytest.raises(RequestCancelledError):
                await task

        asyncio.run(run())
