"""Connections over HTTP and HTTPS: address, certificates."""

from __future__ import annotations

import ssl as tls
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from client.connection import CONNECT_TIMEOUT_S, SSLOptions
from client.errors import ConfigurationError, ConnectError, TLSError

_SCHEMES = ("http://", "https://")


def is_http(url: str) -> bool:
    """Return whether that is the address of a gateway, not of a gRPC service."""
    return url.lower().startswith(_SCHEMES)


class HTTPAddress:
    """Where a gateway is, and how it is spoken to.

    Attributes:
        name: `host:port`, for errors.
        path: what comes before that of each route.
    """

    def __init__(self, url: str, ssl: bool | SSLOptions) -> None:
        """Take `http://host:port/path` or `https://...`; a path `/v1` is that of the routes.

        Raises:
            ConfigurationError: it is none, or a certificate cannot be used.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if not parts.hostname or parts.query or parts.fragment or parts.username:
            raise ConfigurationError(
                f"{url!r}: must be http://host:port or https://host:port", param="url"
            )
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        is_secure = parts.scheme.lower() == "https"
        if ssl and not is_secure:
            raise ConfigurationError(f"{url!r}: must be https://host:port to use TLS", param="url")
        self._host, self._port = parts.hostname, port or (443 if is_secure else 80)
        self.name = f"{self._host}:{self._port}"
        options = ssl if isinstance(ssl, SSLOptions) else SSLOptions()
        self._context = _context(options) if is_secure else None
        self._server_name = options.server_name or self._host

    def connection(self) -> HTTPConnection:
        """Return a connection that is not connected yet."""
        if self._context is None:
            return HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        return _TLSConnection(
            self._context, self._server_name, self._host, self._port, timeout=CONNECT_TIMEOUT_S
        )

    def connect(self, connection: HTTPConnection) -> None:
        """Connect.

        Raises:
            ConnectError: nobody answers there.
            TLSError: no TLS comes about.
        """
        try:
            connection.connect()
        except tls.SSLError as error:
            reason = getattr(error, "verify_message", "") or error.reason or str(error)
            text = reason.lower().replace("_", " ")
            raise TLSError(f"no TLS with {self.name}: {text}") from None
        except OSError:
            raise ConnectError(f"no server answers at {self.name}") from None


class _TLSConnection(HTTPConnection):
    """HTTPS, to a server whose certificate may be for another name than its address."""

    def __init__(
        self, context: tls.SSLContext, server_name: str, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._context = context
        self._server_name = server_name

    def connect(self) -> None:
        """Connect, and agree on TLS."""
        super().connect()
        self.sock = self._context.wrap_socket(self.sock, server_hostname=self._server_name)


def _context(options: SSLOptions) -> tls.SSLContext:
    if (options.private_key is None) != (options.certificate_chain is None):
        raise ConfigurationError(
            "private_key and certificate_chain must be given together", param="ssl"
        )
    try:
        context = tls.create_default_context(cafile=options.root_certificates)
        if options.certificate_chain is not None:
            context.load_cert_chain(options.certificate_chain, options.private_key)
    except (OSError, ValueError) as error:  # also OpenSSL's errors
        raise ConfigurationError(f"the certificates cannot be used: {error}", param="ssl") from None
    return context
