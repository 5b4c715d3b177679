"""Runs a gateway until it is told to stop."""

from __future__ import annotations

import logging
import sys

import uvicorn

from client.gateway.app import create_app
from client.gateway.settings import GatewaySettings

_DRAIN_S = 30  # that answers in flight have to end, after a signal


def serve(settings: GatewaySettings, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT; answers in flight are finished.

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
    return uvicorn.Server(
        uvicorn.Config(
            create_app(settings),
            host=host,
            port=port,
            http="httptools",
            access_log=False,  # ours is written without query strings
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=_DRAIN_S,
        )
    )
