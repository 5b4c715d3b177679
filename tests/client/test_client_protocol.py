"""`trident run`, `chat` and `health` over gRPC and over HTTP: the same answers, errors and ends."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from client import cli
from client.client import TridentClient
from client.client_protocol import ClientProtocol
from client.commands.answer import Answer
from client.commands.chat import Chat
from client.errors import QueueFullError, UnavailableError
from client.gateway.settings import GatewaySettings
from client.gateway_client import GatewayClient
from client.retry import RetryPolicy
from tests.client import fake_triton
from tests.client.command import main
from tests.client.fake_triton import FakeTriton, Piece, serve
from tests.server.gateway.running import running
from tests.waiting import eventually

ROOT = Path(cli.__file__).parents[1]
COMMAND = [sys.executable, "-c", "from client.cli import main; main()"]
ANSWER = [Piece({0: "Hel"}), Piece({0: "lo 🚀"}, finished=(0,), final=True)]
REASONED = [
    Piece({0: "I have "}, section=(0, "reasoning")),
    Piece({0: "to think.\n"}, section=(0, "reasoning")),
    Piece({0: "\n\nHello "}, section=(1, "content")),
    Piece({0: "\x1b[31myou."}, section=(1, "content"), finished=(0,), final=True),
]
GONE = "in ensemble 'ensemble', the engine process has died; the request is lost [code=unavailable]"
FULL = "in ensemble 'ensemble', Maximum queue size of 3 requests reached [code=queue_full]"
READY = '{"state": "ready", "num_in_flight": 0}'
QUESTION = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def asked() -> Iterator[FakeTriton]:
    servicer = FakeTriton()
    server, servicer.url = serve(servicer)
    yield servicer
    server.stop(grace=None).wait()


@pytest.fixture(scope="module")
def gateway(asked: FakeTriton) -> Iterator[str]:
    with running(GatewaySettings((asked.url,))) as address:
        yield f"http://{address}"


@pytest.fixture
def triton(asked: FakeTriton) -> FakeTriton:
    """The server that is asked, over gRPC or HTTP."""
    fresh = FakeTriton(pieces=ANSWER, health=READY)
    for name in ("pieces", "first", "error_message", "health", "requests", "stopped", "cancelled"):
        setattr(asked, name, getattr(fresh, name))
    return asked


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, triton: FakeTriton, gateway: str) -> str:
    return gateway if request.param == "http" else triton.url


@pytest.fixture
def client(url: str) -> Iterator[ClientProtocol]:
    retry = RetryPolicy(attempts=3, first_delay_s=0.01)
    kind = GatewayClient if url.startswith("http") else TridentClient
    with kind(url, retry=retry) as client:
        yield client


class TestRun:
    def test_a_chat(self, triton: FakeTriton, url: str) -> None:
        options = ["--system", "Be kind.", "--seed", "7", "--stop", "END", "--max-tokens", "9"]
        result = CliRunner().invoke(cli.app, ["run", "hi", *options, "--url", url])
        assert (result.exit_code, result.output) == (0, "Hello 🚀\n")
        (request,) = triton.requests
        assert json.loads(request["messages"]) == [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "hi"},
        ]
        sampling = request["sampling_parameters"]
        assert sampling.pop("stop") == ["END"]
        assert sampling == {"max_tokens": 9, "seed": 7, "return_sections": True}

    def test_a_prompt(self, triton: FakeTriton, url: str) -> None:
        command = ["run", "Once", "--raw", "--temperature", "0", "--url", url]
        assert CliRunner().invoke(cli.app, command).output == "Hello 🚀\n"
        (request,) = triton.requests
        assert request["text_input"] == "Once"
        assert request["sampling_parameters"] == {"max_tokens": 256, "temperature": 0.0}

    def test_a_file_gets_no_reasoning(self, triton: FakeTriton, url: str) -> None:
        triton.pieces = REASONED
        output = CliRunner().invoke(cli.app, ["run", "a", "--url", url]).output
        assert output == "Hello \x1b[31myou.\n"

    def test_a_timeout(
        self,
        triton: FakeTriton,
        url: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        triton.pieces = [Piece({0: "a"}), Piece({0: "b"}, delay_s=30)]
        assert main(monkeypatch, "run", "hi", "--timeout", "1", "--url", url) == 1
        assert capsys.readouterr().err == "trident: the request took longer than its timeout\n"
        assert eventually(lambda: triton.stopped or triton.cancelled.is_set())

    @pytest.mark.parametrize(
        "message", ["temperature: [must] not be negative", "the tokenizer failed"]
    )
    def test_errors_are_one_line_and_status_1(
        self,
        triton: FakeTriton,
        url: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        message: str,
    ) -> None:
        triton.pieces, triton.error_message = [], message
        assert main(monkeypatch, "run", "a", "--url", url) == 1
        assert capsys.readouterr().err == f"trident: {message}\n"

    def test_ctrl_c_takes_the_request_back(self, triton: FakeTriton, url: str) -> None:
        triton.pieces = [Piece({0: "Once\n."}), *(Piece({0: "upon\n."}, delay_s=0.2),) * 300]
        pipe = subprocess.PIPE
        command = [*COMMAND, "run", "a", "--url", url]
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "Once\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (130, ""), errors
        assert eventually(lambda: len(triton.stopped) == 1)


class TestChat:
    def _talk(self, client: ClientProtocol, *lines: str) -> str:
        """Say `lines` and return what a terminal shows."""
        remaining = iter([*lines, "/exit"])
        output = io.StringIO()
        console = Console(file=output, force_terminal=True, no_color=True, width=200)
        Chat(client, console, sampling={"max_tokens": 9}, read=lambda _: next(remaining)).run()
        return output.getvalue()

    def test_the_reasoning_is_shown_and_remembered(
        self, triton: FakeTriton, client: ClientProtocol
    ) -> None:
        triton.pieces = REASONED
        shown = self._talk(client, "first", "second")
        dim = re.sub(r"\x1b\[0m|\x1b\[2m", "", shown)
        assert dim.count("I have to think.\n\nHello [31myou.\n6 tokens, first after") == 2
        _, second = (json.loads(request["messages"]) for request in triton.requests)
        assert second == [
            {"role": "user", "content": "first"},
            {
                "role": "assistant",
                "content": "Hello \x1b[31myou.",
                "reasoning_content": "I have to think.",
            },
            {"role": "user", "content": "second"},
        ]

    def test_a_failed_question_is_forgotten(
        self, triton: FakeTriton, client: ClientProtocol
    ) -> None:
        triton.first = [fake_triton.Answer(error_message="messages: too long")]
        shown = self._talk(client, "first", "second")
        assert "messages: too long" in shown
        assert "first" not in triton.requests[-1]["messages"]


class TestHealth:
    def test_one_that_is_well(self, triton: FakeTriton, url: str) -> None:
        result = CliRunner().invoke(cli.app, ["health", "--generate", "--url", url])
        assert result.exit_code == 0
        assert result.output.startswith("healthy: 0 requests in flight, a token took 0.")

    def test_one_that_is_not(
        self,
        triton: FakeTriton,
        url: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        triton.health = '{"state": "dead", "detail": "the engine process has died"}'
        assert main(monkeypatch, "health", "--url", url) == 1
        assert capsys.readouterr().err == "trident: the engine process has died\n"


class TestRetry:
    def test_a_full_server_is_asked_again(self, triton: FakeTriton, client: ClientProtocol) -> None:
        triton.first = [fake_triton.Answer(error_message=FULL)] * 2
        answer = Answer()
        answer.print(client.stream(messages=QUESTION, max_tokens=3), Console(file=io.StringIO()))
        assert len(triton.requests) == 3
        assert answer.text == "Hello 🚀"

    def test_not_for_ever(self, triton: FakeTriton, client: ClientProtocol) -> None:
        triton.pieces, triton.error_message = [], FULL
        with pytest.raises(QueueFullError, match="Maximum queue size of 3"):
            list(client.stream("a", max_tokens=3))
        assert len(triton.requests) == 3

    def test_no_answer_begins_twice(self, triton: FakeTriton, client: ClientProtocol) -> None:
        triton.pieces, triton.error_message = [Piece({0: "once"})], GONE
        chunks = client.stream("a", max_tokens=3)
        assert next(chunks).text == "once"
        with pytest.raises(UnavailableError, match="the engine process has died"):
            list(chunks)
        assert len(triton.requests) == 1
