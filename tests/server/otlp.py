"""A collector of OpenTelemetry spans for tests: OTLP over HTTP in JSON, as tritonserver sends."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    seconds: float
    service: str
    attributes: dict[str, Any]


class Collector:
    """Listens inside a `with` block; `spans` are those that have come so far."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                spans.extend(_read(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _read(body: bytes) -> list[Span]:
    return [
        Span(
            trace_id=span["traceId"],
            span_id=span["spanId"],
            parent_id=span.get("parentSpanId", ""),
            name=span["name"],
            seconds=(int(span["endTimeUnixNano"]) - int(span["startTimeUnixNano"])) / 1e9,
            service=_attributes(resource["resource"])["service.name"],
            attributes=_attributes(span),
        )
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {
        each["key"]: next(iter(each["value"].values())) for each in holder.get("attributes", [])
    }
