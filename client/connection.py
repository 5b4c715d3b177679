"""Settings of a connection: address, TLS, headers, keep-alive."""

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
# 300 s while it sends nothing, or at all without a call; an answer that is computed in one
# piece sends nothing for long. Load balancers commonly forget silent connections after 350 s.
KEEPALIVE_TIME_MS = 310_000
KEEPALIVE_TIMEOUT_MS = 20_000
# gRPC's own 20 s for an attempt to connect, and up to 120 s between two of them, find a restarted
# server late.
CONNECT_TIMEOUT_S = 5.0
MAX_RECONNECT_DELAY_MS = 1_000

# gRPC's own name schemes; such names are passed on unchanged.
_RESOLVERS = re.compile(r"(dns|unix|unix-abstract|ipv4|ipv6|vsock):")
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/@?#\[\]]+):(\d{1,5})")

# This machine, in any of the forms above; no proxy is asked for it.
_LOOPBACK = re.compile(
    r"(?:(?:dns|ipv4|ipv6):/*)?(?:localhost|127(?:\.\d{1,3}){3}|0\.0\.0\.0|\[::1?\]):\d+",
    re.IGNORECASE,
)

_HEADER_NAME = re.compile(r"[0-9a-z_.-]+")
_HEADER_VALUE = re.compile(r"[ -~]*")


@dataclass(frozen=True, slots=True)
class SSLOptions:
    """TLS settings; all files are PEM.

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
    """The settings of a channel, for `grpc` and `grpc.aio` alike.

    Attributes:
        url: `host:port`, or as one of gRPC's resolvers calls it.
        credentials: None is an unencrypted connection.
        options: gRPC's channel arguments.
        headers: sent with each call.
    """

    url: str
    credentials: grpc.ChannelCredentials | None
    options: ChannelOptions
    headers: Headers


def connection(
    url: str,
    ssl: bool | SSLOptions,
    headers: Mapping[str, str],
    connect_timeout: float = CONNECT_TIMEOUT_S,
    *,
    proxy: bool = True,
) -> Connection:
    """Return what a client needs to connect.

    Args:
        proxy: whether to take the proxy that gRPC finds in the environment (`grpc_proxy`,
            `https_proxy`, `http_proxy`), unless the server is on this machine.

    Raises:
        ConfigurationError: the address is none, a file cannot be read, a header cannot be sent, or
            the time to connect is out of its range.
    """
    target, is_secure = address(url)
    chosen = SSLOptions() if ssl is True or (is_secure and not ssl) else ssl or None
    options = _options(chosen, _milliseconds(connect_timeout))
    if not proxy or _LOOPBACK.fullmatch(target):
        options = (*options, ("grpc.enable_http_proxy", 0))
    return Connection(target, _credentials(chosen), options, _headers(headers))


def address(url: str) -> tuple[str, bool]:
    """Return gRPC's name for a server, and whether `url` asks for TLS.

    Args:
        url: `host:port`, `grpc://host:port`, `grpcs://host:port` (TLS), or a name in one of gRPC's
            own schemes such as `unix:/path` and `dns:///host:port`.

    Raises:
        ConfigurationError: it is none of these.
    """
    if not isinstance(url, str):
        raise ConfigurationError(f"must be a string (got {type(url).__name__})", param="url")
    if _RESOLVERS.match(url):
        return url, False
    scheme, separator, rest = url.rpartition("://")
    if separator and scheme.lower() not in ("grpc", "grpcs"):
        raise ConfigurationError(
            f"{url!r}: {scheme}:// is not supported; give the host and port of the server's "
            "gRPC service, such as localhost:8001 (grpcs://host:port for TLS)",
            param="url",
        )
    target = rest.removesuffix("/") if separator else url
    match = _HOST_AND_PORT.fullmatch(target)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigurationError(f"{url!r}: must be host:port, such as localhost:8001", param="url")
    return target, scheme.lower() == "grpcs"


def _milliseconds(connect_timeout: float) -> int:
    if not 0.001 <= connect_timeout <= 3600:
        raise ConfigurationError(
            f"must be between 0.001 and 3600 s (got {connect_timeout})", param="connect_timeout"
        )
    return round(connect_timeout * 1000)


def _credentials(ssl: SSLOptions | None) -> grpc.ChannelCredentials | None:
    if ssl is None:
        return None
    if (ssl.private_key is None) != (ssl.certificate_chain is None):
        raise ConfigurationError(
            "private_key and certificate_chain must be given together", param="ssl"
        )
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
        raise ConfigurationError(f"{name}: {path}: {error.strerror}", param="ssl") from None


def _options(ssl: SSLOptions | None, connect_timeout_ms: int) -> ChannelOptions:
    options: ChannelOptions = (
        # tritonclient's limits are gRPC's 4 MB by default; a prompt may be longer.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # gRPC would share one connection among all clients of a process.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),  # no limit: each is due
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", connect_timeout_ms),  # also the limit of an attempt
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_DELAY_MS),
    )
    if ssl is not None and ssl.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", ssl.server_name))
    return options


def _headers(headers: Mapping[str, str]) -> Headers:
    lowered = tuple((name.lower(), value) for name, value in headers.items())
    for name, value in lowered:
        if not _HEADER_NAME.fullmatch(name) or name.endswith("-bin"):
            raise ConfigurationError(
                f"{name!r} is not a valid name of a text header", param="headers"
            )
        if not _HEADER_VALUE.fullmatch(value):
            # Not the value itself: it may be a key.
            raise ConfigurationError(
                f"the value of {name} must be visible ASCII characters", param="headers"
            )
    return lowered
