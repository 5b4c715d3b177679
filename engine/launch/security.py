"""What `trident serve` closes, and what it encrypts: administrative endpoints, and TLS.

By default tritonserver lets every client load models, name files for logs and traces, and map
shared memory. Here all of these endpoints require a key.
"""

import re
import secrets
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.launch.arguments import value_of
from engine.launch.errors import ServerStartError

ADMIN_KEY = "TRIDENT_ADMIN_KEY"
HTTP_HEADER = "admin-key"
GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"

# Inference, health, metadata, configuration and statistics stay open: they are read-only, and
# clients and perf_analyzer need them.
_ADMINISTRATIVE = "model-repository,shared-memory,trace,logging"
_RESTRICTIONS = ("--http-restricted-api", "--grpc-restricted-protocol")
_KEY = re.compile(r"[!-~]{16,256}", re.ASCII)  # what an HTTP header can carry, without spaces

# vLLM's names, and what tritonserver calls them.
TLS_VARIABLES = {
    "TRIDENT_SSL_CERTFILE": "--grpc-server-cert",
    "TRIDENT_SSL_KEYFILE": "--grpc-server-key",
    "TRIDENT_SSL_CA_CERTS": "--grpc-root-cert",
}


def secured(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return `arguments` with the flags that close the administrative endpoints, and TLS's.

    Flags of the user take precedence over `environ`. The key is `TRIDENT_ADMIN_KEY`, or a random
    one that is not shown. tritonserver accepts it on its command line only.

    Raises:
        ServerStartError: the key is too short, or a certificate cannot be used.
    """
    closed = [*arguments, *_restrictions(arguments, environ)]
    encrypted = [*closed, *_tls_flags(closed, environ)]
    _check_tls(encrypted)
    return encrypted


def is_administration_open(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the key was given, or the endpoints are restricted by flags of the user."""
    return bool(environ.get(ADMIN_KEY)) or any(
        value_of(arguments, flag) is not None for flag in _RESTRICTIONS
    )


def has_tls(arguments: Sequence[str]) -> bool:
    """Return whether the gRPC service of a server with these flags uses TLS."""
    return _is_on(arguments, "--grpc-use-ssl") or wants_certificates(arguments)


def wants_certificates(arguments: Sequence[str]) -> bool:
    """Return whether such a server takes only clients with a certificate (mTLS)."""
    return _is_on(arguments, "--grpc-use-ssl-mutual")


def _restrictions(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    key = environ.get(ADMIN_KEY) or secrets.token_urlsafe(32)
    if not _KEY.fullmatch(key):
        raise ServerStartError(
            f"{ADMIN_KEY} must be 16 to 256 visible ASCII characters (it has {len(key)})",
            "make one with: openssl rand -hex 32",
        )
    return [
        f"{flag}={_ADMINISTRATIVE}:{HTTP_HEADER}={key}"
        for flag in _RESTRICTIONS
        if value_of(arguments, flag) is None
    ]


def _tls_flags(arguments: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Return the flags for the TLS variables, except those that the user gave."""
    given = {flag: environ[name] for name, flag in TLS_VARIABLES.items() if environ.get(name)}
    if not given:
        return []
    given["--grpc-use-ssl"] = "true"
    if "--grpc-root-cert" in given:  # a client must show a certificate of this authority
        given["--grpc-use-ssl-mutual"] = "true"
    return [f"{flag}={value}" for flag, value in given.items() if value_of(arguments, flag) is None]


def _check_tls(arguments: Sequence[str]) -> None:
    if not has_tls(arguments):
        return
    certificate = _file(arguments, "--grpc-server-cert", "TRIDENT_SSL_CERTFILE")
    key = _file(arguments, "--grpc-server-key", "TRIDENT_SSL_KEYFILE")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An encrypted key would be asked for on the terminal; tritonserver cannot ask.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise ServerStartError(
            f"the TLS certificate {certificate} and the key {key} cannot be used together: "
            f"{_reason(error)}",
            "both must be PEM files, the key unencrypted and made for the certificate",
        ) from None
    if not wants_certificates(arguments):
        return
    authorities = _file(arguments, "--grpc-root-cert", "TRIDENT_SSL_CA_CERTS")
    try:
        context.load_verify_locations(authorities)
    except ssl.SSLError as error:
        raise ServerStartError(
            f"{authorities} holds no certificates in PEM format: {_reason(error)}"
        ) from None


def _file(arguments: Sequence[str], flag: str, variable: str) -> Path:
    value, names = value_of(arguments, flag), f"{flag} (or the variable {variable})"
    if not value:
        raise ServerStartError(f"TLS needs {names}")
    path = Path(value)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ServerStartError(f"{names}: {path}: {error.strerror}") from None
    return path


def _is_on(arguments: Sequence[str], flag: str) -> bool:
    return (value_of(arguments, flag) or "false").lower() in ("1", "true", "on")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
