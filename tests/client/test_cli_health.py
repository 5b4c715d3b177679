"""`trident health`, and the options that say which server: exit statuses and texts."""

import re
from pathlib import Path

import grpc
import pytest
import trustme
from typer.testing import CliRunner

from client import cli
from tests.client.command import main
from tests.client.fake_triton import HELLO, Answer, FakeTriton, Piece, serve


class TestHealth:
    def _run(self, triton: FakeTriton, *arguments: str) -> str:
        result = CliRunner().invoke(cli.app, ["health", "--url", triton.url, *arguments])
        assert result.exit_code == 0, result.output
        return result.output

    def test_one_line(self, triton: FakeTriton) -> None:
        assert self._run(triton) == "healthy: 3 requests in flight\n"
        assert not triton.requests

    def test_tells_of_restarts(self, triton: FakeTriton) -> None:
        triton.health = '{"state": "ready", "num_restarts": 2}'
        assert "restarted 2 times" in self._run(triton)

    def test_generates_one_token(self, triton: FakeTriton) -> None:
        triton.pieces = HELLO
        assert re.search(r"in flight, a token took \d\.\d\d s\n$", self._run(triton, "--generate"))
        (request,) = triton.requests
        assert request["sampling_parameters"] == {"max_tokens": 1}

    def test_a_full_queue_is_not_an_error(self, triton: FakeTriton) -> None:
        triton.error_message = "Maximum queue size of 3 requests reached"
        assert "the queue is full" in self._run(triton, "--generate", "--timeout", "2")

    @pytest.mark.parametrize(
        ("health", "text"),
        [
            ('{"state": "restarting", "detail": "the engine process hung"}', "process hung"),
            ('{"state": "closed"}', "the engine is closed"),
        ],
    )
    def test_not_ready_is_status_1(
        self,
        triton: FakeTriton,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        health: str,
        text: str,
    ) -> None:
        triton.health = health
        assert main(monkeypatch, "health", "--url", triton.url) == 1
        output = capsys.readouterr()
        assert re.fullmatch(rf"trident: .*{text}\n", output.err)
        assert not output.out

    @pytest.mark.parametrize(
        ("answer", "text"),
        [
            (Answer([Piece({0: ""}, finished=(0,), final=True)]), "no token was generated"),
            (Answer([Piece({0: "a"}, delay_s=30)]), "longer than its timeout"),
            (Answer(error_message="internal error"), "internal error"),
        ],
    )
    def test_no_token_is_status_1(
        self,
        triton: FakeTriton,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        answer: Answer,
        text: str,
    ) -> None:
        triton.first = [answer]
        arguments = ["health", "--generate", "--timeout", "1", "--url", triton.url]
        assert main(monkeypatch, *arguments) == 1
        assert text in capsys.readouterr().err

    def test_no_server(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("TRIDENT_URL", "localhost:9")
        assert main(monkeypatch, "health", "--generate") == 1
        assert capsys.readouterr().err == (
            "trident: no server answers at localhost:9 "
            "(trident serve starts a server; --url gives the address of one)\n"
        )


class TestConnectionOptions:
    def test_headers(self, triton: FakeTriton) -> None:
        headers = ["--header", "authorization=Bearer a=b", "--header", "X-Team=blue"]
        result = CliRunner().invoke(cli.app, ["health", "--url", triton.url, *headers])
        assert result.exit_code == 0, result.output
        assert triton.calls[0].headers["authorization"] == "Bearer a=b"
        assert triton.calls[0].headers["x-team"] == "blue"

    def test_tls(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        issued = authority.issue_cert("inference.example.org")
        pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
        triton = FakeTriton(pieces=HELLO)
        server, url = serve(triton, credentials=grpc.ssl_server_credentials([pair]))
        arguments = ["run", "a", "--url", url, "--tls-ca", str(tmp_path / "ca.pem")]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 1
        monkeypatch.setenv("TRIDENT_TLS_NAME", "inference.example.org")
        result = CliRunner().invoke(cli.app, arguments)
        assert (result.exit_code, result.output) == (0, "Hello world\n")
        server.stop(grace=None).wait()

    @pytest.mark.parametrize(
        ("arguments", "text"),
        [
            (["--header", "authorization"], "--header authorization: must be NAME=VALUE"),
            (["--tls-ca", "/nonexistent.pem"], "--tls-ca: /nonexistent.pem: No such file"),
            (["--tls-key", "/key.pem"], "--tls-cert and --tls-key must be given together"),
        ],
    )
    def test_wrong(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        arguments: list[str],
        text: str,
    ) -> None:
        assert main(monkeypatch, "health", *arguments) == 1
        assert text in capsys.readouterr().err
