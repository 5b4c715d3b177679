"""Our clients against the real server: health, cancellation by id, deadlines."""

import os
import re
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from client import Completion, RetryPolicy, TridentClient, cli
from client.errors import (
    InvalidRequestError,
    RequestTimeoutError,
    UnavailableError,
    UnsupportedRequestError,
)
from engine.launch.server import TritonServer
from tests.client.clients import BOTH, AnyClient
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.engine_process import engine_process
from tests.waiting import eventually

pytestmark = pytest.mark.server

LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(params=BOTH, ids=["sync", "async"])
def connect(request: pytest.FixtureRequest) -> Callable[..., AnyClient]:
    return request.param


def _in_flight(client: TridentClient, number: int) -> None:
    assert eventually(lambda: client.health().num_in_flight == number, 30)


def test_health(server: TritonServer, connect: Callable[..., AnyClient]) -> None:
    with connect(server.grpc_url) as client:
        health = client.health()
        assert client.is_ready()
        assert (health.state, health.detail) == ("ready", "")


def test_a_prompt_as_text_and_as_token_ids(
    server: TritonServer, connect: Callable[..., AnyClient]
) -> None:
    tokenizer = byte_level_tokenizer()
    prompt = f"Say {connect.__name__} at a length of more than a block of tokens."
    asked: Any = {"max_tokens": 8, "temperature": 0.0}
    with connect(server.grpc_url) as client:
        by_text = client.generate(prompt, **asked)
        by_ids = client.generate(tokenizer.encode(prompt), **asked)
        assert by_ids.text == by_text.text
        echoed = client.generate(tokenizer.encode(prompt), echo=True, **asked)
        assert echoed.text == prompt + by_text.text
        assert (by_text.num_cached_tokens, by_ids.num_cached_tokens) == (
            0,
            (by_text.num_input_tokens - 1) // 16 * 16,
        )
        with pytest.raises(InvalidRequestError, match=r"^input_ids\[0\]: token id 9999 is outside"):
            client.generate([9999])


def test_the_template_gets_what_a_chat_gives_it(server: TritonServer) -> None:
    messages = [{"role": "assistant", "content": "Once upon"}]
    with TridentClient(server.grpc_url) as client:
        continued = client.generate(
            messages=messages, chat_parameters={"continue_final_message": True}, max_tokens=1
        )
        assert continued.num_input_tokens == len(
            byte_level_tokenizer().encode("<|assistant|>Once upon")
        )
        with pytest.raises(UnsupportedRequestError, match=r"^tools: not supported by this model"):
            client.generate(
                messages=messages,
                chat_parameters={"tools": [{"type": "function", "function": {"name": "f"}}]},
            )
        with pytest.raises(InvalidRequestError, match=r"^chat_parameters: needs messages"):
            client.generate("a", chat_parameters={})


def test_health_counts_what_is_in_flight(slow_server: TritonServer) -> None:
    with TridentClient(slow_server.grpc_url) as client:
        stream = client.stream("a", **LONG)
        next(stream)
        assert client.health().num_in_flight == 1
        stream.close()
        _in_flight(client, 0)


def test_the_command(server: TritonServer) -> None:
    arguments = ["health", "--generate", "--url", server.grpc_url]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    pattern = r"healthy: \d+ requests in flight(, the engine .* times)?, a token took [\d.]+ s\n"
    assert re.fullmatch(pattern, result.output)


def test_cancel_ends_a_request_with_what_it_has(
    slow_server: TritonServer, connect: Callable[..., AnyClient]
) -> None:
    answers: list[Completion] = []
    long: Any = {**LONG, "n": 16, "temperature": 1.0}

    def generate() -> None:
        with TridentClient(slow_server.grpc_url) as other:
            answers.append(other.generate("a", request_id="to-stop", **long))

    with TridentClient(slow_server.grpc_url) as watcher, connect(slow_server.grpc_url) as client:
        thread = threading.Thread(target=generate)
        thread.start()
        _in_flight(watcher, 1)
        client.cancel("another")
        assert watcher.health().num_in_flight == 1
        client.cancel("to-stop")
        thread.join(timeout=30)
        (answer,) = answers
        assert answer.finish_reason == "abort"
        assert answer.num_output_tokens < 16 * LONG["max_tokens"]
        _in_flight(watcher, 0)


def test_a_timeout_is_an_error_and_frees_the_engine(
    server: TritonServer, connect: Callable[..., AnyClient]
) -> None:
    with connect(server.grpc_url) as client, TridentClient(server.grpc_url) as watcher:
        client.health()
        with pytest.raises(RequestTimeoutError):
            client.generate("a", timeout=0.1, **LONG)
        _in_flight(watcher, 0)


def test_a_restart_of_the_engine_is_waited_for_by_what_has_not_begun(
    server: TritonServer, connect: Callable[..., AnyClient]
) -> None:
    patient = RetryPolicy(attempts=100, first_delay_s=0.3, factor=1)
    with connect(server.grpc_url, retry=patient) as client:
        solo = client.generate("a", max_tokens=8, temperature=0.0).text
        begun = client.stream("a", **LONG)
        next(begun)
        os.kill(engine_process(server).pid, signal.SIGKILL)
        with pytest.raises(UnavailableError, match="the engine process has died"):
            list(begun)
        with pytest.raises(UnavailableError, match="the engine process"):
            client.health()
        assert client.generate("a", max_tokens=8, temperature=0.0, timeout=30).text == solo
        assert client.is_ready()


def test_request_ids_that_the_server_refuses(server: TritonServer) -> None:
    with TridentClient(server.grpc_url) as client, pytest.raises(InvalidRequestError):
        client.generate("a", request_id="x" * 10_000, max_tokens=1)
