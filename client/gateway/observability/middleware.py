"""Middleware around every request: its id, its line in the log, and metrics."""

from __future__ import annotations

import logging
import re
import time
from uuid import uuid4

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from client.gateway.errors import is_anthropic
from client.gateway.observability.metrics import GatewayMetrics

log = logging.getLogger("trident.gateway")

# Asked again and again, by probes, Prometheus and the page: these answers are logged when they
# change.
_POLLED = ("/health", "/health/ready", "/metrics")
_ROUTINE = (200, 503)
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestLog:
    """Gives each request an id (`x-request-id`, the client's if it sent one) and logs its end.

    A line has no more of a request than its method, its path and its id.
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._polled = dict.fromkeys(_POLLED, 200)  # their last status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status = 499  # unless an answer begins
        started = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if is_anthropic(scope["path"]):
                    headers["request-id"] = request_id  # Anthropic's name
            await send(message)

        self._metrics.started()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "unknown")
            self._metrics.ended(route, status, seconds)
            level = logging.INFO
            if route in self._polled and status in _ROUTINE:
                level = logging.DEBUG if status == self._polled[route] else logging.INFO
                self._polled[route] = status
            line = "%s %s %d %.3f s id=%s"
            log.log(level, line, scope["method"], route, status, seconds, request_id)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(text := value.decode("latin-1")):
            return str(text)
    return uuid4().hex
