"""Runs a gateway until it is told to stop."""

from __future__ import annotations

import logging
import sys

import uvicorn

from client.errors import ConfigurationError
from client.gateway.app import create_app
from client.gateway.security.http_protocol import BoundedHttpProtocol
from client.gateway.settings import GatewaySettings


def serve(settings: GatewaySettings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; answers in flight are finished, unless SIGINT comes again.

    Raises:
        ConfigurationError: a setting is wrong.
        SystemExit: it cannot listen there.
    """
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("trident").setLevel(logging.INFO)
    make_server(settings, host, port).run()


def make_server(settings: GatewaySettings, host: str, port: int) -> uvicorn.Server:
    """Return a server that has not been started.

    Raises:
        ConfigurationError: a setting is wrong.
    """
    config = uvicorn.Config(
        create_app(settings),
        host=host,
        port=port,
        http=BoundedHttpProtocol,
        ws="none",
        access_log=False,  # ours is written without query strings
        log_level="warning",
        server_header=False,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    try:
        config.load()
    except OSError as error:  # also what OpenSSL says
        raise ConfigurationError(f"ssl_certfile, ssl_keyfile: {error}") from None
    return uvicorn.Server(config)
