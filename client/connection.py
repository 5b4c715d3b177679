"""What a connection is made of: encryption, headers, and how a dead one is noticed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import grpc

from client.errors import ConfigurationError

ChannelOptions = tuple[tuple[str, int | str], ...]
Headers = tuple[tuple[str, str], ...]

# tritonserver 24.10 closes a connection (GOAWAY, "too_many_pings") that pings more often than every
# 300 s while it has nothing to say, or at all without a call; an answer that is computed in one
# piece says nothing for long. Load balancers commonly forget silent connections after 350 s.
KEEPALIVE_TIME_MS = 310_000
KEEPALIVE_TIMEOUT_MS = 20_000
# A connection attempt that nobody answers ends after this, and so do the pauses between attempts:
# gRPC's own 20 s and 120 s would find a restarted server late.
CONNECT_TIMEOUT_MS = 5_000
MAX_RECONNECT_DELAY_MS = 1_000

_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class SSLOptions:
    """How to speak TLS with the server; all files are PEM.

    Attributes:
        root_certificates: of the authorities that the server's certificate may come from; None
            takes those that gRPC comes with.
        private_key: the client's, for a server that wants certificates of its clients.
        certificate_chain: the client's certificate, with it.
        server_name: the name that the certificate is for, if the address has another.
    """

    root_certificates: str | PathLike[str] | None = None
    private_key: str | PathLike[str] | None = None
    certificate_chain: str | PathLike[str] | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Connection:
    """What `grpc` and `grpc.aio` alike make a channel from.

    Attributes:
        url: `host:port`.
        credentials: None is a connection in the clear.
        options: gRPC's channel arguments.
        headers: sent with each call.
    """

    url: str
    credentials: grpc.ChannelCredentials | None
    options: ChannelOptions
    headers: Headers


def connection(url: str, ssl: bool | SSLOptions, headers: Mapping[str, str]) -> Connection:
    """Return what a client needs to connect.

    Raises:
        ConfigurationError: a file cannot be read, or a header cannot be sent.
    """
    chosen = SSLOptions() if ssl is True else ssl or None
    return Connection(url, _credentials(chosen), _options(chosen), _headers(headers))


def _credentials(ssl: SSLOptions | None) -> grpc.ChannelCredentials | None:
    if ssl is None:
        return None
    if (ssl.private_key is None) != (ssl.certificate_chain is None):
        raise ConfigurationError("ssl: private_key and certificate_chain go together")
    return grpc.ssl_channel_credentials(
        _content("root_certificates", ssl.root_certificates),
        _content("private_key", ssl.private_key),
        _content("certificate_chain", ssl.certificate_chain),
    )


def _content(name: str, path: str | PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"ssl: {name}: {path}: {error.strerror}") from None


def _options(ssl: SSLOptions | None) -> ChannelOptions:
    options: ChannelOptions = (
        # tritonclient's limits are gRPC's 4 MB unless told otherwise; a prompt may be longer.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # gRPC would share one connection among all clients of a process.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: each is due
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_DELAY_MS),
    )
    if ssl is not None and ssl.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", ssl.server_name))
    return options


def _headers(headers: Mapping[str, str]) -> Headers:
    lowered = tuple((name.lower(), value) for name, value in headers.items())
    for name, value in lowered:
        if not _HEADER_NAME.fullmatch(name) or name.endswith("-bin"):
            raise ConfigurationError(f"headers: {name!r} is not the name of a text header")
        if not _HEADER_VALUE.fullmatch(value):
            # Not the value itself: it may be a key.
            raise ConfigurationError(f"headers: the value of {name} is not visible ASCII")
    return lowered
