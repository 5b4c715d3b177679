"""Server-sent events in OpenAI's and Anthropic's forms."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.gateway.errors import ApiError, ClientDisconnectedError
from client.gateway.http.disconnect import until_disconnected

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect them
]
_DONE = b"data: [DONE]\n\n"


class EventEncoder:
    """Encodes events; for one event loop."""

    def __init__(self) -> None:
        self._encode = msgspec.json.Encoder().encode

    def __call__(self, event: msgspec.Struct) -> bytes:
        """Return `event` as it goes over the wire."""
        return b"data: %b\n\n" % self._encode(event)

    def named(self, name: str, event: msgspec.Struct) -> bytes:
        """Return `event` with the name of its type."""
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encode(event))


class EventStream(Response):
    """A response of events.

    Nothing is sent before the first event is there: what fails until then is answered with its own
    status. An error after that is an event, and the last one. If the client goes, `events` is
    cancelled.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, is_named: bool = False) -> None:
        """Take the events.

        Args:
            events: encoded.
            is_named: whether they have names: then an error is the event `error`. Otherwise
                `[DONE]` follows the last one.
        """
        super().__init__()
        self._events = events
        self._is_named = is_named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with suppress(ClientDisconnectedError):
            await until_disconnected(receive, self._send(scope, send))

    async def _send(self, scope: Scope, send: Send) -> None:
        has_begun = False
        async with aclosing(self._events) as events:
            try:
                async for event in events:
                    if not has_begun:
                        await send(
                            {"type": "http.response.start", "status": 200, "headers": _HEADERS}
                        )
                        has_begun = True
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except ApiError as error:
                if not has_begun:
                    raise
                name = b"event: error\n" if self._is_named else b""
                event = b"%bdata: %b\n\n" % (name, error.body(scope))
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"" if self._is_named else _DONE})
