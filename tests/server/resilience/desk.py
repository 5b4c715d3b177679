"""Opens conversations with a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc

from tests.server.caller import Caller
from tests.server.resilience.conversation import (
    GrpcConversation,
    HttpConversation,
    LostConversation,
)

TIMEOUT_S = 120.0


class Addresses(Protocol):
    """The addresses of a server, `host:port`."""

    @property
    def grpc_url(self) -> str: ...
    @property
    def http_url(self) -> str: ...


class Desk:
    """All transports to one server; an asynchronous context manager.

    Each method returns a conversation with `model` about `inputs`, not sent yet.
    """

    def __init__(self, server: Addresses, *, timeout_s: float = TIMEOUT_S) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._builder = Caller(server.grpc_url, server.http_url)
        self._channel = grpc.aio.insecure_channel(server.grpc_url)

    def grpc(
        self, inputs: Mapping[str, Any], *, model: str = "ensemble", request_id: str = ""
    ) -> GrpcConversation:
        """A gRPC stream on the shared connection."""
        message = self._builder.request(model, request_id=request_id, **_asked(model, inputs))
        return GrpcConversation(self._channel, message, self._timeout_s)

    def lost(
        self, inputs: Mapping[str, Any], *, model: str = "ensemble", request_id: str = ""
    ) -> LostConversation:
        """A gRPC stream on a connection that can be cut."""
        message = self._builder.request(model, request_id=request_id, **_asked(model, inputs))
        return LostConversation(self._server.grpc_url, message, self._timeout_s)

    def http(
        self, inputs: Mapping[str, Any], *, model: str = "ensemble", request_id: str = ""
    ) -> HttpConversation:
        """An HTTP request."""
        url, asked = self._server.http_url, _asked(model, inputs)
        return HttpConversation(url, model, asked, request_id, self._timeout_s)

    async def __aenter__(self) -> Desk:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        self._builder.close()


def _asked(model: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `inputs` with the options that make answers tell how they finished."""
    return {**inputs, **({} if model == "engine" else {"return_finish_reason": True})}
