"""Server-sent events in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from client.gateway.disconnect import until_disconnected
from client.gateway.errors import ApiError, ClientDisconnectedError

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


class EventStream(Response):
    """A response of events, which ends with `[DONE]`.

    Nothing is sent before the first event is there: what fails until then is answered with its own
    status. An error after that is an event, and the last but `[DONE]`. If the client goes,
    `events` is cancelled.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        with suppress(ClientDisconnectedError):
            await until_disconnected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
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
                event = b"data: %b\n\n" % error.body()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": _DONE})
