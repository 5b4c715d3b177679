"""Both clients: TLS, headers, health and cancellation by id."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from client import Health, SSLOptions
from client.errors import (
    ConfigurationError,
    InvalidRequestError,
    QueueFullError,
    ServerError,
    TLSError,
    UnavailableError,
)
from tests.client.clients import Connect
from tests.client.fake_triton import HELLO, FakeTriton, Piece, serve


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def pem(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the authority's certificate and those of another, a client and its key."""
    folder = tmp_path_factory.mktemp("pem")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    trustme.CA().cert_pem.write_to_path(folder / "other.pem")
    client = authority.issue_cert("client@example.org")
    client.private_key_pem.write_to_path(folder / "key.pem")
    client.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    return folder


def _secure(authority: trustme.CA, name: str, mutual: bool) -> Iterator[FakeTriton]:
    issued = authority.issue_cert(name)
    pair = (issued.private_key_pem.bytes(), issued.cert_chain_pems[0].bytes())
    credentials = grpc.ssl_server_credentials(
        [pair],
        root_certificates=authority.cert_pem.bytes() if mutual else None,
        require_client_auth=mutual,
    )
    triton = FakeTriton(pieces=HELLO)
    server, triton.url = serve(triton, credentials=credentials)
    yield triton
    server.stop(grace=None).wait()


@pytest.fixture
def secure(authority: trustme.CA) -> Iterator[FakeTriton]:
    yield from _secure(authority, "localhost", mutual=False)


@pytest.fixture
def mutual(authority: trustme.CA) -> Iterator[FakeTriton]:
    yield from _secure(authority, "inference.example.org", mutual=True)


class TestTLS:
    def test_with_the_authority_of_the_server(
        self, secure: FakeTriton, pem: Path, connect: Connect
    ) -> None:
        with connect(secure.url, ssl=SSLOptions(pem / "ca.pem")) as client:
            assert client.generate("a").text == "Hello world"
            assert client.is_ready()

    @pytest.mark.parametrize("ssl", [True, "other"], ids=["public", "other"])
    def test_certificate_of_unknown_authority(
        self, secure: FakeTriton, pem: Path, connect: Connect, ssl: Any
    ) -> None:
        options = SSLOptions(pem / "other.pem") if ssl == "other" else ssl
        with (
            connect(secure.url, ssl=options) as client,
            pytest.raises(TLSError, match="certificate verify failed"),
        ):
            client.generate("a")
        assert not secure.calls

    def test_certificate_for_another_name(
        self, mutual: FakeTriton, pem: Path, connect: Connect
    ) -> None:
        files = (pem / "ca.pem", pem / "key.pem", pem / "cert.pem")
        with (
            # With retries: now and then gRPC tells that the connection was closed, and not why.
            connect(mutual.url, ssl=SSLOptions(*files)) as client,
            pytest.raises(TLSError, match="its certificate is for another name"),
        ):
            client.generate("a")
        with connect(mutual.url, ssl=SSLOptions(*files, "inference.example.org")) as client:
            assert client.generate("a").text == "Hello world"

    def test_server_that_wants_a_certificate(
        self, mutual: FakeTriton, pem: Path, connect: Connect
    ) -> None:
        ssl = SSLOptions(pem / "ca.pem", server_name="inference.example.org")
        with (
            connect(mutual.url, ssl=ssl, retry=None) as client,
            pytest.raises(
                UnavailableError, match="want TLS, or a client certificate, or that is not its gRPC"
            ),
        ):
            client.generate("a")
        assert not mutual.calls

    def test_tls_to_a_server_without(self, triton: FakeTriton, connect: Connect) -> None:
        with (
            connect(triton.url, ssl=True) as client,
            pytest.raises(TLSError, match="wrong version"),
        ):
            client.generate("a")

    def test_no_tls_to_a_server_with(self, secure: FakeTriton, connect: Connect) -> None:
        with (
            connect(secure.url, retry=None) as client,
            pytest.raises(UnavailableError, match="may want TLS"),
        ):
            client.generate("a")

    @pytest.mark.parametrize(
        ("ssl", "text"),
        [
            (SSLOptions("/nonexistent/ca.pem"), "root_certificates: /nonexistent/ca.pem: No such"),
            (
                SSLOptions(private_key="key.pem"),
                "private_key and certificate_chain must be given together",
            ),
        ],
    )
    def test_wrong_files(self, connect: Connect, ssl: SSLOptions, text: str) -> None:
        with pytest.raises(ConfigurationError, match=text):
            connect("localhost:9", ssl=ssl)


class TestHeaders:
    def test_go_with_each_call(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        headers = {"Authorization": "Bearer abc", "triton-grpc-protocol-admin-key": "s3cret"}
        with connect(triton.url, headers=headers) as client:
            client.generate("a")
            client.health()
            client.cancel("x")
        assert len(triton.calls) == 3
        for call in triton.calls:
            assert call.headers["authorization"] == "Bearer abc"
            assert call.headers["triton-grpc-protocol-admin-key"] == "s3cret"

    @pytest.mark.parametrize(
        ("headers", "text"),
        [
            ({"a b": "c"}, "'a b' is not a valid name"),
            ({"": "c"}, "'' is not a valid name"),
            ({"x-bin": "c"}, "'x-bin' is not a valid name"),
            ({"key": "very\nsecret"}, "the value of key must be visible ASCII"),
        ],
    )
    def test_that_cannot_be_sent(
        self, connect: Connect, headers: dict[str, str], text: str
    ) -> None:
        with pytest.raises(ConfigurationError, match=text) as caught:
            connect("localhost:9", headers=headers)
        assert "secret" not in str(caught.value)


class TestHealth:
    def test_asks_the_engine(self, triton: FakeTriton, connect: Connect) -> None:
        with connect(triton.url) as client:
            assert client.health() == Health("ready", num_in_flight=3)
            assert client.is_ready()
        assert triton.calls[0].inputs == {"health": True}
        assert triton.calls[0].model == "engine"

    def test_not_ready(self, triton: FakeTriton, connect: Connect) -> None:
        text = "the engine process has died and is being restarted; try again in a few seconds"
        triton.health_error = f"{text} [code=unavailable]"
        with connect(triton.url) as client:
            with pytest.raises(UnavailableError, match=text):
                client.health()
            assert not client.is_ready()
        assert len(triton.calls) == 2  # the truth is asked for now: no second try

    def test_not_ready_in_its_own_words(self, triton: FakeTriton, connect: Connect) -> None:
        triton.health = '{"state": "restarting", "detail": "the engine process died"}'
        with connect(triton.url) as client:
            assert client.health() == Health("restarting", "the engine process died")
            assert not client.is_ready()

    @pytest.mark.parametrize("ready", [True, False])
    def test_server_without_the_input(
        self, triton: FakeTriton, connect: Connect, ready: bool
    ) -> None:
        triton.health, triton.ready = "", ready
        with connect(triton.url) as client:
            assert client.is_ready() is ready
            if ready:
                assert client.health() == Health("ready")
            else:
                with pytest.raises(UnavailableError, match="the model ensemble is not ready"):
                    client.health()

    @pytest.mark.parametrize("text", ["{", "[]", '{"state": 3}'])
    def test_unreadable(self, triton: FakeTriton, connect: Connect, text: str) -> None:
        triton.health = text
        with connect(triton.url) as client, pytest.raises(ServerError, match="health: "):
            client.health()

    def test_no_server(self, connect: Connect) -> None:
        with connect("localhost:9") as client:
            assert not client.is_ready(timeout=5)


class TestCancel:
    def test_sends_a_stop_request_of_that_id(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = [Piece({0: ""}, finished=(0,), final=True)]
        with connect(triton.url) as client:
            client.cancel("job-7")
        assert [call.inputs for call in triton.calls] == [{"stop": True}]
        assert (triton.calls[0].model, triton.calls[0].request_id) == ("ensemble", "job-7")

    def test_needs_an_id(self, triton: FakeTriton, connect: Connect) -> None:
        with (
            connect(triton.url) as client,
            pytest.raises(InvalidRequestError, match="request_id: must not be empty"),
        ):
            client.cancel("")
        assert not triton.calls

    def test_requests_carry_their_id(self, triton: FakeTriton, connect: Connect) -> None:
        triton.pieces = HELLO
        with connect(triton.url) as client:
            client.generate("a", request_id="job-7")
            assert list(client.stream("a", request_id="job-8"))
            client.generate("a")
            client.generate("a")
        *given, own, other = [call.request_id for call in triton.calls]
        assert given == ["job-7", "job-8"]
        assert own
        assert own != other

    def test_errors_are_raised(self, triton: FakeTriton, connect: Connect) -> None:
        triton.error_message = "Maximum queue size of 3 requests reached"
        with connect(triton.url, retry=None) as client, pytest.raises(QueueFullError):
            client.cancel("x")


def test_each_client_has_a_connection_of_its_own(triton: FakeTriton, connect: Connect) -> None:
    triton.pieces = HELLO
    with connect(triton.url) as one, connect(triton.url) as other:
        one.generate("a")
        other.generate("b")
    assert len({call.peer for call in triton.calls}) == len(triton.calls) == 2
