"""The flags that close administrative endpoints and give TLS."""

import ssl
from pathlib import Path

import pytest
import trustme

from engine.launch.arguments import value_of
from engine.launch.errors import ServerStartError
from engine.launch.security import has_tls, is_administration_open, secured

KEY = "0123456789abcdef"
HTTP, GRPC = "--http-restricted-api", "--grpc-restricted-protocol"


class TestAdministration:
    def test_closed_with_a_key_that_nobody_knows(self) -> None:
        first, second = (value_of(secured([], {}), HTTP) for _ in range(2))
        assert first is not None
        groups, _, key = first.partition(":admin-key=")
        assert set(groups.split(",")) == {"model-repository", "shared-memory", "trace", "logging"}
        assert len(key) >= 32
        assert first != second
        assert not is_administration_open([], {})

    def test_own_key_for_both_protocols(self) -> None:
        arguments = secured(["--http-port=1"], {"TRIDENT_ADMIN_KEY": KEY})
        assert arguments[0] == "--http-port=1"
        for flag in (HTTP, GRPC):
            assert (value_of(arguments, flag) or "").endswith(f":admin-key={KEY}")
        assert is_administration_open([], {"TRIDENT_ADMIN_KEY": KEY})

    @pytest.mark.parametrize("given", [[f"{HTTP}=trace:k=v"], [HTTP, "trace:k=v"]])
    def test_flags_of_the_user_win(self, given: list[str]) -> None:
        arguments = secured(given, {"TRIDENT_ADMIN_KEY": KEY})
        assert value_of(arguments, HTTP) == "trace:k=v"
        assert sum(each.startswith(HTTP) for each in arguments) == 1
        assert KEY in (value_of(arguments, GRPC) or "")
        assert is_administration_open(given, {})

    @pytest.mark.parametrize("key", ["short", "with a space in it", "ünicode" * 5, "x" * 257])
    def test_key_that_is_none(self, key: str) -> None:
        with pytest.raises(ServerStartError, match="TRIDENT_ADMIN_KEY must be 16 to 256") as caught:
            secured([], {"TRIDENT_ADMIN_KEY": key})
        assert key not in str(caught.value)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Certificate, key and authority, by the variables that name them."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.cert_chain_pems[0].write_to_path(folder / "server.crt")
    issued.private_key_pem.write_to_path(folder / "server.key")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    return {
        "TRIDENT_SSL_CERTFILE": str(folder / "server.crt"),
        "TRIDENT_SSL_KEYFILE": str(folder / "server.key"),
        "TRIDENT_SSL_CA_CERTS": str(folder / "ca.crt"),
    }


class TestTls:
    def test_off_without_certificates(self) -> None:
        assert not has_tls(secured([], {"TRIDENT_SSL_CERTFILE": ""}))

    def test_certificate_and_key(self, files: dict[str, str]) -> None:
        arguments = secured([], {k: v for k, v in files.items() if "CA_CERTS" not in k})
        assert has_tls(arguments)
        assert value_of(arguments, "--grpc-server-cert") == files["TRIDENT_SSL_CERTFILE"]
        assert value_of(arguments, "--grpc-server-key") == files["TRIDENT_SSL_KEYFILE"]
        assert value_of(arguments, "--grpc-use-ssl-mutual") is None

    def test_authority_of_clients(self, files: dict[str, str]) -> None:
        arguments = secured([], files)
        assert value_of(arguments, "--grpc-use-ssl-mutual") == "true"
        assert value_of(arguments, "--grpc-root-cert") == files["TRIDENT_SSL_CA_CERTS"]

    def test_flags_of_the_user_win(self, files: dict[str, str]) -> None:
        assert not has_tls(secured(["--grpc-use-ssl=false", "--grpc-use-ssl-mutual=0"], files))

    def test_missing_half(self, files: dict[str, str]) -> None:
        with pytest.raises(ServerStartError, match=r"--grpc-server-key .*TRIDENT_SSL_KEYFILE"):
            secured([], {"TRIDENT_SSL_CERTFILE": files["TRIDENT_SSL_CERTFILE"]})
        with pytest.raises(ServerStartError, match="--grpc-server-cert"):
            secured(["--grpc-use-ssl=1"], {})

    def test_missing_file(self, files: dict[str, str], tmp_path: Path) -> None:
        gone = str(tmp_path / "gone.pem")
        with pytest.raises(ServerStartError, match=r"TRIDENT_SSL_KEYFILE.*gone\.pem: No such file"):
            secured([], {**files, "TRIDENT_SSL_KEYFILE": gone})

    def test_key_of_another_certificate(self, files: dict[str, str], tmp_path: Path) -> None:
        other = tmp_path / "other.key"
        trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
        with pytest.raises(ServerStartError, match=r"cannot be used together: .*MISMATCH"):
            secured([], {**files, "TRIDENT_SSL_KEYFILE": str(other)})

    @pytest.mark.parametrize("name", ["TRIDENT_SSL_CERTFILE", "TRIDENT_SSL_CA_CERTS"])
    def test_no_pem(self, files: dict[str, str], tmp_path: Path, name: str) -> None:
        junk = tmp_path / "junk.pem"
        junk.write_bytes(b"junk")
        with pytest.raises(ServerStartError, match=r"PEM|together") as caught:
            secured([], {**files, name: str(junk)})
        assert not isinstance(caught.value.__cause__, ssl.SSLError)
