"""The line that each request leaves in the log."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message, Receive, Scope, Send

from client.gateway.observability.metrics import GatewayMetrics
from client.gateway.observability.middleware import RequestLog


def test_what_is_polled_is_logged_when_its_status_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "trident.gateway")
    statuses = {
        "/health/ready": [503, 503, 200, 200, 503],
        "/metrics": [200, 401, 401, 200],  # whoever has no key leaves a line each time
        "/v1/completions": [200, 200, 400],
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        status = statuses[scope["route"].path].pop(0)
        await send({"type": "http.response.start", "status": status, "headers": []})

    async def dropped(message: Message) -> None:
        pass

    log = RequestLog(app, GatewayMetrics(CollectorRegistry()))
    for path, answers in statuses.items():
        for _ in list(answers):
            scope: dict[str, Any] = {
                "type": "http", "method": "GET", "path": path, "headers": [],
                "route": SimpleNamespace(path=path),
            }  # fmt: skip
            asyncio.run(log(scope, None, dropped))  # type: ignore[arg-type]
    found = [record.getMessage().split()[1:3] for record in caplog.records]
    assert found == [
        *(["/health/ready", status] for status in ("503", "200", "503")),
        *(["/metrics", "401"] for _ in range(2)),
        *(["/v1/completions", status] for status in ("200", "200", "400")),
    ]
