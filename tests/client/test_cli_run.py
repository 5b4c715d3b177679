"""`trident run`: prompts from the command line or a pipe, options, ends before the end."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from client import cli
from tests.client.command import main
from tests.client.fake_triton import FakeTriton, Piece

ROOT = Path(cli.__file__).parents[1]
ANSWER = [Piece({0: "Hel"}), Piece({0: "lo 🚀"}, finished=(0,), final=True)]
COMMAND = [sys.executable, "-c", "from client.cli import main; main()", "run"]


def run(triton: FakeTriton, *arguments: str, stdin: str | bytes = "") -> str:
    """Run the command; return what it printed."""
    triton.pieces = triton.pieces or ANSWER
    result = CliRunner().invoke(cli.app, ["run", *arguments, "--url", triton.url], input=stdin)
    assert result.exit_code == 0, result.output
    return result.output


class TestPrompt:
    def test_of_the_command_line(self, triton: FakeTriton) -> None:
        assert run(triton, "a question", "--max-tokens", "9") == "Hello 🚀\n"
        (request,) = triton.requests
        assert request["messages"] == '[{"role": "user", "content": "a question"}]'
        assert request["sampling_parameters"] == {"max_tokens": 9, "return_sections": True}
        assert request["stream"] is True

    def test_raw_is_sent_as_it_stands(self, triton: FakeTriton) -> None:
        run(triton, "Once", "--raw", "--temperature", "0")
        assert triton.requests[0]["text_input"] == "Once"
        assert triton.requests[0]["sampling_parameters"] == {"max_tokens": 256, "temperature": 0.0}

    @pytest.mark.parametrize("arguments", [(), ("-",)], ids=["nothing", "dash"])
    def test_of_standard_input(self, triton: FakeTriton, arguments: tuple[str, ...]) -> None:
        run(triton, *arguments, "--raw", stdin="Zwölf\n\n東京\n")
        assert triton.requests[0]["text_input"] == "Zwölf\n\n東京"

    @pytest.mark.parametrize(
        ("stdin", "text"),
        [("", "standard input: is empty"), (b"a\xff\n", "standard input: is not UTF-8")],
    )
    def test_unusable_standard_input(
        self, triton: FakeTriton, stdin: str | bytes, text: str
    ) -> None:
        result = CliRunner().invoke(cli.app, ["run", "--url", triton.url], input=stdin)
        assert text in str(result.exception)
        assert not triton.calls

    @pytest.mark.parametrize("command", ["run", "run -", "chat"])
    def test_a_closed_standard_input(self, triton: FakeTriton, command: str) -> None:
        words = [*COMMAND[:-1], *command.split(), "--url", triton.url]
        ended = subprocess.run(
            ["bash", "-c", 'exec "$@" <&-', "bash", *words],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (1, "trident: standard input: is closed\n")

    def test_missing_in_a_terminal(self, triton: FakeTriton) -> None:
        master, slave = os.openpty()
        command = [*COMMAND, "--url", triton.url]
        ended = subprocess.run(
            command, stdin=slave, capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
        )
        os.close(master)
        os.close(slave)
        assert ended.returncode == 2
        assert "PROMPT: is missing; give one" in ended.stderr


class TestOptions:
    def test_system_seed_and_stop(self, triton: FakeTriton) -> None:
        options = ["--system", "Be kind.", "--seed", "7", "--stop", "END", "--stop", "\n\n"]
        run(triton, "hi", *options)
        (request,) = triton.requests
        assert request["messages"] == (
            '[{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]'
        )
        assert request["sampling_parameters"] == {
            "max_tokens": 256,
            "seed": 7,
            "stop": ["END", "\n\n"],
            "return_sections": True,
        }
        assert "timeout" not in request

    def test_timeout(
        self,
        triton: FakeTriton,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        triton.pieces = [Piece({0: "a"}, delay_s=30)]
        assert main(monkeypatch, "run", "hi", "--timeout", "1", "--url", triton.url) == 1
        assert capsys.readouterr().err == "trident: the request took longer than its timeout\n"

    def test_the_address_of_the_environment(
        self, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRIDENT_URL", triton.url)
        triton.pieces = ANSWER
        assert CliRunner().invoke(cli.app, ["run", "hi"]).output == "Hello 🚀\n"

    def test_the_name_of_the_model(
        self, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run(triton, "hi", "--served-model-name", "mine")
        monkeypatch.setenv("TRIDENT_SERVED_MODEL_NAME", "yours")
        run(triton, "hi")
        assert [call.model for call in triton.calls if call.model != "engine"] == ["mine", "yours"]

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["run", "a", "--max-tokens", "x"], "--max-tokens"),
            (["run", "a", "b"], "(b) (trident run --help says more)"),
            (["run", "a", "--raw", "--system", "b"], "--system: needs the chat template"),
            (["run", "a", "--sed", "1"], "No such option: --sed"),
            (["nonsense"], "No such command 'nonsense'"),
            (["bench", "diff"], "Missing argument"),
        ],
    )
    def test_usage_errors_are_one_line_and_status_2(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        text: str,
    ) -> None:
        assert main(monkeypatch, *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("trident: ")
        assert text in line


class TestEnds:
    def test_a_terminal_that_lacks_characters(self, triton: FakeTriton) -> None:
        triton.pieces = [Piece({0: "Zwölf 🚀"}, finished=(0,), final=True)]
        shown = subprocess.run(
            [*COMMAND, "a", "--url", triton.url],
            env={**os.environ, "PYTHONIOENCODING": "latin-1"},
            capture_output=True,
            cwd=ROOT,
            check=True,
        ).stdout
        assert shown == "Zwölf ?\n".encode("latin-1")

    def _start(self, triton: FakeTriton) -> "subprocess.Popen[str]":
        """Start an answer that would take long, and read the beginning of it."""
        triton.pieces = [Piece({0: "Once\n"}), *(Piece({0: "upon\n"}, delay_s=0.2),) * 300]
        command = [*COMMAND, "a", "--url", triton.url]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
        assert process.stdout is not None
        assert process.stdout.readline() == "Once\n"
        return process

    def test_ctrl_c_takes_the_request_back(self, triton: FakeTriton) -> None:
        with self._start(triton) as process:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (130, ""), errors
        assert triton.stopped == {triton.calls[-2].request_id}

    def test_a_reader_that_has_enough(self, triton: FakeTriton) -> None:
        with self._start(triton) as process:
            assert process.stdout is not None
            process.stdout.close()  # as `| head -1` does
            assert process.stderr is not None
            assert process.stderr.read() == ""
        assert process.returncode == 1
        assert triton.stopped

    def test_errors_are_one_line_and_status_1(
        self,
        triton: FakeTriton,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        triton.error = (grpc.StatusCode.INVALID_ARGUMENT, "max_tokens: [must] be positive")
        assert main(monkeypatch, "run", "a", "--url", triton.url) == 1
        assert capsys.readouterr().err == "trident: max_tokens: [must] be positive\n"
