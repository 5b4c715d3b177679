"""Both clients against a scripted server: what they send, what they make of the answers."""

import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from client import Completion, CompletionOutput
from client.errors import (
    AccessDeniedError,
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    RequestTimeoutError,
    ServerError,
    TridentClientError,
    UnavailableError,
    UnsupportedRequestError,
)
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, FakeTriton, Piece

Generate = Callable[..., Completion]


@pytest.fixture
def generate(connect: Connect) -> Generate:
    """`generate` of a client of its own, which tries only once."""

    def run(url: str, *args: Any, **options: Any) -> Completion:
        with connect(url, retry=None) as client:
            return client.generate(*args, **options)

    return run


class TestGenerate:
    def test_sends_the_prompt_and_options(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        generate(triton.url, "héllo 🚀", max_tokens=5, stop=["x"], temperature=0.5)
        assert triton.requests == [
            {
                "text_input": "héllo 🚀",
                "sampling_parameters": {"max_tokens": 5, "stop": ["x"], "temperature": 0.5},
                "stream": True,
                "exclude_input_in_output": True,
                "return_finish_reason": True,
                "return_num_input_tokens": True,
                "return_num_output_tokens": True,
                "return_num_cached_tokens": True,
                "return_stop_reason": True,
            }
        ]

    def test_logprobs_ask_for_their_output(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        generate(triton.url, "a", logprobs=0)
        generate(triton.url, "a")
        assert [each.get("return_logprobs") for each in triton.requests] == [True, None]

    def test_sends_messages_as_json(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = HELLO
        generate(triton.url, messages=[{"role": "user", "content": "ü"}])
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
        completion = generate(triton.url, "a")
        assert completion.text == "Hello world"
        assert completion.finish_reason == "stop"
        assert completion.num_output_tokens == 1 + 0 + 2 + 1
        assert completion.num_input_tokens == 7
        assert completion.ttft is not None
        assert 0 < completion.ttft <= completion.duration

    def test_a_response_without_data_is_no_answer(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = [Piece(None, final=True)]
        with pytest.raises(ServerError, match="without an answer"):
            generate(triton.url, "a")

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

    def test_a_server_that_does_not_end_the_stream(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = [Piece({0: "a"}, finished=(0,), final=True), Piece(None, delay_s=30)]
        started = time.monotonic()
        assert generate(triton.url, "a").text == "a"
        assert time.monotonic() - started < 20

    def test_stream_that_ends_early_is_an_error(
        self, triton: FakeTriton, generate: Generate
    ) -> None:
        triton.pieces = HELLO[:2]
        with pytest.raises(UnavailableError, match="before it was complete"):
            generate(triton.url, "a")

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("Request for unknown model: 'ensemble' is not found", InvalidRequestError),
            ("[request id: 7] Exceeds maximum queue size", QueueFullError),
            ("Stub process 'tokenizer_0_0' is not healthy.", UnavailableError),
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
            (grpc.StatusCode.RESOURCE_EXHAUSTED, UnavailableError),
            (grpc.StatusCode.UNAUTHENTICATED, AccessDeniedError),
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

    @pytest.mark.parametrize(
        ("status", "text", "expected"),
        [
            (
                grpc.StatusCode.UNAVAILABLE,
                "This protocol is restricted, expecting header 'triton-grpc-protocol-x'",
                AccessDeniedError,
            ),
            (
                grpc.StatusCode.UNAVAILABLE,
                "Maximum queue size of 3 requests reached",
                QueueFullError,
            ),
            (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "SERVER: Received message larger than max (9 vs. 4)",
                InvalidRequestError,
            ),
        ],
    )
    def test_raises_by_the_text_where_the_status_says_too_little(
        self,
        triton: FakeTriton,
        generate: Generate,
        status: grpc.StatusCode,
        text: str,
        expected: type[TridentClientError],
    ) -> None:
        triton.error = (status, text)
        with pytest.raises(expected) as caught:
            generate(triton.url, "a")
        assert type(caught.value) is expected
        assert str(caught.value) == text

    def test_timeout_cancels_on_the_server(self, triton: FakeTriton, generate: Generate) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        timeout = 0.3
        while not triton.requests:  # it may be over before the server is reached
            with pytest.raises(RequestTimeoutError):
                generate(triton.url, "a", timeout=timeout)
            timeout *= 2
        assert triton.cancelled.wait(60)

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
            (("a",), {"request_id": "\ud800"}, "request_id: is not valid Unicode"),
            (("a",), {"timeout": float("nan")}, "timeout: must be a number"),
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
