"""The address of a server: what is taken, and what is refused before anything is sent."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client import ConfigurationError
from client.connection import address
from tests.client.clients import Connect
from tests.client.command import main
from tests.client.fake_triton import HELLO, FakeTriton


@pytest.mark.parametrize(
    ("url", "target", "is_secure"),
    [
        ("localhost:8001", "localhost:8001", False),
        ("grpc://localhost:8001", "localhost:8001", False),
        ("GRPC://localhost:8001/", "localhost:8001", False),
        ("grpcs://inference.example.org:443", "inference.example.org:443", True),
        ("[::1]:8001", "[::1]:8001", False),
        ("grpc://[fe80::1%eth0]:8001", "[fe80::1%eth0]:8001", False),
        ("a_b-c.d:1", "a_b-c.d:1", False),
        ("unix:/run/trident.sock", "unix:/run/trident.sock", False),
        ("dns:///host:8001", "dns:///host:8001", False),
    ],
)
def test_taken(url: str, target: str, is_secure: bool) -> None:
    assert address(url) == (target, is_secure)


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("http://localhost:8000", r"http:// is not supported; give the host and port .* gRPC"),
        ("https://host:443", "https:// is not supported"),
        ("localhost", "must be host:port"),
        ("", "must be host:port"),
        (":8001", "must be host:port"),
        ("localhost:", "must be host:port"),
        ("localhost:0", "must be host:port"),
        ("localhost:65536", "must be host:port"),
        ("localhost:8001/v2", "must be host:port"),
        ("grpc://user@host:8001", "must be host:port"),
        ("::1:8001", "must be host:port"),
        ("local host:8001", "must be host:port"),
        (8001, "must be a string"),
    ],
)
def test_refused_at_once(connect: Connect, url: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^url: .*{text}"):
        connect(url)


@given(st.text(max_size=30))
def test_whatever_is_given(url: str) -> None:
    try:
        target, _ = address(url)
    except ConfigurationError:
        return
    assert ":" in target
    assert not any(character.isspace() for character in target) or target.startswith("unix")


def test_with_a_scheme(triton: FakeTriton, connect: Connect) -> None:
    triton.pieces = HELLO
    with connect(f"grpc://{triton.url}") as client:
        assert client.generate("a").text == "Hello world"


@pytest.mark.parametrize("command", [["run", "hi"], ["chat"], ["health"]])
def test_of_the_commands(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIDENT_URL", "ftp://localhost:8000")
    assert main(monkeypatch, *command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trident: url: 'ftp://localhost:8000': ftp:// is not supported")
