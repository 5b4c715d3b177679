"""Both clients against a scripted server: what they send, what they make of the answers."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest

from client import AsyncTridentClient, Chunk, Completion, CompletionOutput, TridentClient
from client.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    TridentClientError,
    UnavailableError,
    UnsupportedRequestError,
)
from tests.client.fake_triton import FakeTriton, Piece

HELLO = [
    Piece({0: "Hel"}),
    Piece({0: ""}),
    Piece({0: "lo wor"}),
    Piece({0: "ld"}, finished=(0,), final=True),
]

Generate = Callable[..., Completion]


def _sync_generate(url: str, *args: Any, **options: Any) -> Completion:
    with TridentClient(url) as client:
        return client.generate(*args, **options)


def _async_generate(url: str, *args: Any, **options: Any) -> Completion:
    async def run() -> Completion:
        async with AsyncTridentClient(url) as client:
            return await client.generate(*args, **options)

    return asyncio.run(run())


@pytest.fixture(params=[_sync_generate, _async_generate], ids=["sync", "async"])
def generate(request: pytest.FixtureRequest) -> Generate:
    return request.param


class TestGenerate:
    def test_sends_the_prompt_and_options(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        generate(triton.url, "héllo 🚀", max_tokens=5, stop=["x"], temperature=0.5)
        assert triton.requests == [
            {
                "text_input": "héllo 🚀",
                "sampling_parameters": {"max_tokens": 5, "stop": ["x"], "temperature": 0.5},
                "stream": False,
                "exclude_input_in_output": True,
                "return_finish_reason": True,
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
            }
        ]

    def test_sends_messages_as_json(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        generate(triton.url, messages=[{"role": "user", "content": "ü"}], stream=True)
        assert triton.requests[0]["messages"] == '[{"role": "user", "content": "ü"}]'
        assert "text_input" not in triton.requests[0]
        assert triton.requests[0]["stream"] is True

    @pytest.mark.parametrize(("max_batch_size", "shape"), [(1, [1, 1]), (0, [1])])
    def test_shapes_follow_the_model_configuration(
        self, triton: FakeTriton, generate: Generate, max_batch_size: int, shape: list[int]
    ) -> None:
        triton.max_batch_size, triton.pieces = max_batch_size, HELLO
        generate(triton.url, "a")
        assert triton.shapes
        assert all(each == shape for each in triton.shapes)

    def test_puts_the_answer_together(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        completion = generate(triton.url, "a", stream=True)
        assert completion.text == "Hello world"
        assert completion.finish_reason == "stop"
        assert completion.num_output_tokens == 1 + 0 + 2 + 1
        assert completion.num_input_tokens == 7
        assert completion.ttft is not None
        assert 0 < completion.ttft <= completion.duration

    def test_has_no_first_token_time_unless_streamed(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = HELLO
        assert generate(triton.url, "a").ttft is None

    def test_keeps_sequences_apart(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = [
            Piece({1: "x ", 0: "a "}),
            Piece({0: "b"}, finished=(0,)),
            Piece({1: "y"}, finished=(1,), final=True),
        ]
        assert generate(triton.url, "a", n=2).outputs == (
            CompletionOutput("a b", 0, "stop", 2),
            CompletionOutput("x y", 1, "stop", 2),
        )

    def test_final_flag_in_a_response_of_its_own(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = [Piece({0: "abc"}, finished=(0,)), Piece(None, final=True)]
        assert generate(triton.url, "a").text == "abc"

    def test_stream_that_ends_early_is_an_error(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = HELLO[:2]
        with pytest.raises(UnavailableError, match="before it was complete"):
            generate(triton.url, "a")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("top_p: must be at most 1 (got 3)", InvalidRequestError),
            ("text_input, messages: give one of them, not both", InvalidRequestError),
            ("messages[0].content[1]: must be an object", InvalidRequestError),
            ("beam_width: not supported by this version of Trident", UnsupportedRequestError),
            ("Request for unknown model: 'ensemble' is not found", InvalidRequestError),
            ("Maximum queue size of 3 requests reached (max_num_queued_reqs)", QueueFullError),
            ("the engine process has died; the request is lost", UnavailableError),
            ("the request was cancelled", RequestCancelledError),
            ("internal error", ServerError),
        ],
    )
    def test_raises_by_the_text_of_a_response(
        self, triton: FakeTriton, generate: Generate, text: str, expected: type[TridentClientError]
    ) -> None:
        triton.error_message = f"in ensemble 'ensemble', {text}"
        with pytest.raises(expected) as caught:
            generate(triton.url, "a")
        assert type(caught.value) is expected
        assert str(caught.value) == text

    @pytest.mark.parametrize(
        ("status", "expected"),
        [
            (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequestError),
            (grpc.StatusCode.UNAVAILABLE, UnavailableError),
            (grpc.StatusCode.UNIMPLEMENTED, UnsupportedRequestError),
            (grpc.StatusCode.INTERNAL, ServerError),
        ],
    )
    def test_raises_by_the_status_of_a_call(
        self,
        triton: FakeTriton,
        generate: Generate,
        status: grpc.StatusCode,
        expected: type[TridentClientError],
    ) -> None:
        triton.error = (status, "words")
        with pytest.raises(expected, match="words") as caught:
            generate(triton.url, "a")
        assert type(caught.value) is expected

    def test_timeout_cancels_on_the_server(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        with pytest.raises(RequestTimeoutError):
            generate(triton.url, "a", timeout=0.3)
        assert triton.cancelled.wait(5)

    def test_no_server(self, generate: Generate) -> None:
        with pytest.raises(UnavailableError, match="no server answers at localhost:9"):
            generate("localhost:9", "a")

    @pytest.mark.parametrize(
        ("args", "options", "text"),
        [
            ((), {}, "either a prompt or messages"),
            (("a",), {"messages": []}, "either a prompt or messages"),
            (("a",), {"temperature": float("nan")}, "JSON"),
            (("a",), {"stop": object()}, "JSON"),
            (("\ud800",), {}, "text_input: is not valid Unicode"),
        ],
    )
    def test_refuses_what_cannot_be_sent(
        self,
        triton: FakeTriton,
        generate: Generate,
        args: tuple[str, ...],
        options: dict[str, Any],
        text: str,
    ) -> None:
        with pytest.raises(InvalidRequestError, match=text):
            generate(triton.url, *args, **options)
        assert not triton.requests


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
            assert triton.cancelled.wait(5)

    def test_closing_the_client_cancels(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        client = TridentClient(triton.url)
        chunks = client.stream("a")
        next(chunks)
        threading.Timer(0.1, client.close).start()
        with pytest.raises(RequestCancelledError):
            next(chunks)

    def test_many_threads_share_a_client(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        texts: list[str] = []
        with TridentClient(triton.url) as client:
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
        _sync_generate(triton.url, "a")  # whatever gRPC starts once
        before = _client_threads()
        for _ in range(5):
            _sync_generate(triton.url, "a")
        deadline = time.monotonic() + 5
        while len(_client_threads()) > len(before) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(_client_threads()) <= len(before)

    def test_is_ready(self, triton: FakeTriton) -> None:
        with TridentClient(triton.url) as client:
            assert client.is_ready()
            triton.ready = False
            assert not client.is_ready()
        with TridentClient("localhost:9") as client:
            assert not client.is_ready(timeout=0.2)


def _client_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if "ThreadPoolExecutor" not in t.name]


class TestAsyncStream:
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

    def test_cancelling_the_task_cancels_the_request(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> bool:
            async with AsyncTridentClient(triton.url) as client:
                task = asyncio.create_task(client.generate("a", stream=True))
                while not triton.requests:
                    await asyncio.sleep(0.01)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                return await asyncio.to_thread(triton.cancelled.wait, 5)

        assert asyncio.run(run())

    def test_closing_the_client_is_no_task_cancellation(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]

        async def run() -> None:
            client = AsyncTridentClient(triton.url)
            task = asyncio.create_task(client.generate("a", stream=True))
            while not triton.requests:
                await asyncio.sleep(0.01)
            await client.close()
            with pytest.raises(RequestCancelledError):
                await task

        asyncio.run(run())

    def test_is_ready(self, triton: FakeTriton) -> None:
        async def run(url: str) -> bool:
            async with AsyncTridentClient(url) as client:
                return await client.is_ready(timeout=1)

        assert asyncio.run(run(triton.url))
        assert not asyncio.run(run("localhost:9"))
