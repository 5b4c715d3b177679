"""The `trident` command without a tritonserver: flags, texts, exit statuses."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from client import cli
from client.client import TridentClient
from client.commands import serve as serve_command
from client.commands.answer import Answer
from client.commands.chat import Chat
from client.commands.demo_display import DemoRequest, answers, figures, frame
from client.commands.gateway_process import GatewayOptions
from client.protocol import Chunk
from engine.config.engine_config import EngineConfig
from engine.launch.environment import settings_variables
from tests.client.command import main
from tests.client.fake_triton import FakeTriton, Piece

ANSWER = [Piece({0: "Hel"}), Piece({0: "lo 🚀"}, finished=(0,), final=True)]


class TestServe:
    @pytest.fixture
    def served(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        """What `trident serve` hands to the launcher."""
        seen: dict[str, Any] = {}

        def serve(
            settings: Any, arguments: Any, gateway: GatewayOptions, repository: Any, _: Console
        ) -> int:
            given = {name: value for name, value in settings.items() if value is not None}
            seen.update(settings=given, arguments=list(arguments), repository=repository)
            seen.update(gateway=gateway)
            return 0

        monkeypatch.setattr(serve_command, "serve", serve)
        return seen

    def test_settings_and_flags_for_tritonserver(self, served: dict[str, Any]) -> None:
        arguments = (
            "serve --model m --max-num-seqs 8 --http-port 9000 --no-enable-prefix-caching "
            "--log-verbose=1 --mem-fraction-static 0.5 --model-repository /r --grpc-port 0 "
            "--openai-port off --openai-workers 3 --no-async-scheduling"
        )
        result = CliRunner().invoke(cli.app, arguments.split())
        assert result.exit_code == 0, result.output
        assert served == {
            "settings": {
                "model": "m",
                "max_num_seqs": "8",
                "enable_prefix_caching": False,
                "async_scheduling": False,
                "gpu_memory_utilization": "0.5",
            },
            "arguments": ["--http-port", "9000", "--log-verbose=1", "--grpc-port", "0"],
            "gateway": GatewayOptions("off", "127.0.0.1", 3),
            "repository": Path("/r"),
        }

    @pytest.mark.parametrize(
        "arguments",
        [
            "/m --max-num-seqs 8 --http-port 9000 --host 0.0.0.0",
            "--host=0.0.0.0 --http-port 9000 --max-num-seqs 8 /m",
            "--http-port 9000 /m --max-num-seqs 8 --host 0.0.0.0 --model /m",
        ],
    )
    def test_model_without_a_flag(self, served: dict[str, Any], arguments: str) -> None:
        result = CliRunner().invoke(cli.app, ["serve", *arguments.split()])
        assert result.exit_code == 0, result.output
        assert served["settings"] == {"model": "/m", "max_num_seqs": "8"}
        assert served["arguments"] == ["--http-port", "9000"]
        assert served["gateway"].host == "0.0.0.0"

    def test_a_command_line_of_vllm(self, served: dict[str, Any]) -> None:
        arguments = (
            "serve /m --port 8080 --host 0.0.0.0 --tensor-parallel-size 1 -pp 1 --dtype half "
            "--no-trust-remote-code --enable-auto-tool-choice --async-scheduling "
            "--disable-log-requests --api-key sk-a --api-key sk-b"
        )
        result = CliRunner().invoke(cli.app, arguments.split())
        assert result.exit_code == 0, result.output
        gateway = GatewayOptions("8080", "0.0.0.0", api_keys=("sk-a", "sk-b"))
        assert (served["gateway"], served["arguments"]) == (gateway, [])
        assert settings_variables(served["settings"]) == {
            "TRIDENT_MODEL": "/m",
            "TRIDENT_DTYPE": "float16",
            "TRIDENT_ASYNC_SCHEDULING": "true",
            "TRIDENT_TENSOR_PARALLEL_SIZE": "1",
        }

    def test_help_lists_every_setting(self) -> None:
        output = CliRunner().invoke(cli.app, ["serve", "--help"]).output
        for name in EngineConfig.model_fields:
            assert f"--{name.replace('_', '-')}" in output

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--max-num-seqs", "many"], "max_num_seqs"),
            (["--max-num-seqs", "0"], "max_num_seqs"),
            (["-pp", "2"], "pipeline_parallel_size: not supported"),
            (["--api-key", "sk a"], "--api-key must not be empty or contain spaces"),
            (["--enable-lora"], "enable_lora: not supported"),
            (["--max-num-sqs", "1"], "did you mean --max-num-seqs"),
            (["--http-port", "http"], "--http-port"),
            (["--openai-port", "on"], "--openai-port must be a port number or off"),
            (["--openai-port", "8001"], "port 8001 is given to both"),
            (["m", "--model", "n"], "got m and --model n"),
            (["m", "--http-port", "1", "n"], "got m and n"),
            (["--model-repository", "/nonexistent"], "/nonexistent"),
        ],
    )
    def test_wrong_flags_are_one_line_and_status_1(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        text: str,
    ) -> None:
        assert main(monkeypatch, "serve", *arguments) == 1
        lines = capsys.readouterr().err.strip().splitlines()
        assert lines[0].startswith("trident: ")
        assert len(lines) <= 2
        assert text in "\n".join(lines)

    def test_unknown_model(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--model", "/nonexistent/model", "--http-port=0", "--grpc-port=0"]
        ports = ("--metrics-port=0", "--openai-port=0")
        assert main(monkeypatch, "serve", *arguments, *ports) == 1
        assert "/nonexistent/model" in capsys.readouterr().err


class TestChat:
    def _talk(
        self,
        triton: FakeTriton,
        *lines: str | BaseException | type[BaseException],
        system: str = "",
    ) -> str:
        """Say `lines` and return what was shown; an exception is raised in place of a line."""
        remaining = iter(lines)

        def read(prompt: str) -> str:
            line = next(remaining, EOFError)
            if isinstance(line, str):
                return line
            raise line

        output = io.StringIO()
        with TridentClient(triton.url) as client:
            console = Console(file=output, width=200)
            Chat(client, console, system=system, sampling={"max_tokens": None}, read=read).run()
        return output.getvalue()

    def test_remembers_the_conversation(self, triton: FakeTriton) -> None:
        triton.pieces = ANSWER
        shown = self._talk(triton, "first", "", "second", system="Be kind.")
        assert shown.count("Hello 🚀\n") == 2
        assert re.search(r"3 tokens, first after \d\.\d\d s, \d+ tokens/s", shown)
        first, second = (request["messages"] for request in triton.requests)
        assert first == (
            '[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "first"}]'
        )
        assert second == first[:-1] + (
            ', {"role": "assistant", "content": "Hello 🚀"}, {"role": "user", "content": "second"}]'
        )

    def test_reset_forgets_and_exit_ends(self, triton: FakeTriton) -> None:
        triton.pieces = ANSWER
        self._talk(triton, "first", "/reset", "second", "/exit", "third")
        assert len(triton.requests) == 2
        assert "first" not in triton.requests[1]["messages"]

    def test_ctrl_c_at_the_prompt_goes_on(self, triton: FakeTriton) -> None:
        triton.pieces = ANSWER
        assert "Hello" in self._talk(triton, KeyboardInterrupt, "first")

    @pytest.mark.parametrize(
        ("line", "text"),
        [
            (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad start"), "not UTF-8: bad start"),
            ("a\udcff", "not valid Unicode"),  # as with LC_ALL=C
        ],
    )
    def test_a_line_that_is_no_text_is_refused_alone(
        self, triton: FakeTriton, line: str | BaseException, text: str
    ) -> None:
        triton.pieces = ANSWER
        shown = self._talk(triton, "first", line, "second")
        assert text in shown
        assert '"first"' in triton.requests[-1]["messages"]
        assert '"second"' in triton.requests[-1]["messages"]
        assert len(triton.requests) == 2

    def test_ctrl_c_stops_the_answer_only(
        self, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        triton.pieces = [Piece({0: "Hel"}), Piece({0: "lo"}, delay_s=30)]
        write = io.StringIO.write

        def interrupted(stream: io.StringIO, text: str) -> int:
            if text == "Hel" and not triton.cancelled.is_set():
                monkeypatch.setattr(TridentClient, "stream", _answered)
                write(stream, text)
                raise KeyboardInterrupt
            return write(stream, text)

        class Output(io.StringIO):
            write = interrupted  # type: ignore[assignment]

        monkeypatch.setattr(io, "StringIO", Output)
        shown = self._talk(triton, "first", "second")
        assert "stopped" in shown
        assert "again" in shown
        assert triton.cancelled.wait(60)

    def test_a_model_cannot_steer_the_terminal(self) -> None:
        chunks = [Chunk("a\x1b[31mb\x9bc\n\td", finish_reason="stop")]
        terminal = Console(file=io.StringIO(), force_terminal=True)
        Answer().print(chunks, terminal)
        assert terminal.file.getvalue() == "a[31mbc\n\td\n"  # type: ignore[attr-defined]
        file = Console(file=io.StringIO())
        Answer().print(chunks, file)
        assert file.file.getvalue() == "a\x1b[31mb\x9bc\n\td\n"  # type: ignore[attr-defined]

    def test_a_failed_question_is_forgotten(self, triton: FakeTriton) -> None:
        triton.error = (grpc.StatusCode.INVALID_ARGUMENT, "messages: too long")
        assert "messages: too long" in self._talk(triton, "first")
        self._talk(triton, "first", "second")
        assert "first" not in triton.requests[-1]["messages"]


def _answered(*args: Any, **options: Any) -> Iterator[Chunk]:
    yield Chunk("again", finish_reason="stop", num_output_tokens=1)


class TestDemoDisplay:
    def _requests(self) -> list[DemoRequest]:
        requests = [DemoRequest(i, f"Question {i} that is quite long?") for i in range(1, 9)]
        for request in requests:
            request.start()
            for word in ["Ein [b]Wort[/b]", " 東京 🚀"] * request.number * 2:
                request.add(Chunk(word, num_output_tokens=2))
        for request in requests[:4]:
            request.end()
        requests[4].end("the server is gone")
        return requests

    @pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)])
    def test_frame_fits_the_terminal(self, size: tuple[int, int]) -> None:
        console = Console(width=size[0], height=size[1], record=True, file=io.StringIO())
        console.print(frame(self._requests(), console.size))
        lines = console.export_text().splitlines()
        assert len(lines) < size[1]
        assert all(Text(line).cell_len <= size[0] for line in lines)
        assert any("5 of 8 answered, 288 tokens" in line for line in lines)
        assert any("the server is gone" in line for line in lines)

    @pytest.mark.parametrize("width", [80, 120])
    def test_answers_and_figures_in_full(self, width: int) -> None:
        requests = self._requests()
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(answers(requests, width))
        console.print(figures(requests, width))
        text = console.export_text()
        assert text.count("[b]Wort[/b]") >= sum(2 * q.number for q in requests if not q.problem)
        rows = [line for line in text.splitlines() if re.match(r"\s*\d\s+Question \d", line)]
        assert len(rows) == 8
        assert re.search(r"all at once\s+<= \d\.\d{3} s\s+288\s+\d+\.\d\d s\s+\d+\.\d", text)
        assert all(Text(line).cell_len <= width for line in text.splitlines())

    def test_an_empty_answer_is_a_problem(self) -> None:
        request = DemoRequest(1, "?")
        request.start()
        assert request.add(Chunk(" \n"))
        assert not request.add(Chunk(""))
        request.end()
        assert request.problem == "the answer is empty"


def test_version() -> None:
    assert re.fullmatch(r"trident \S.*\n", CliRunner().invoke(cli.app, ["--version"]).output)


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_the_list_of_commands_says_what_each_says_of_itself(name: str) -> None:
    _, listed = cli.COMMANDS[name]
    lines = CliRunner().invoke(cli.app, [name, "--help"]).output.splitlines()
    assert listed in (line.strip() for line in lines)
