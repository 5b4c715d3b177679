"""The ways in which a request can end early."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from tests.server.resilience.conversation import Conversation
from tests.server.resilience.desk import Desk

PROMPT: Mapping[str, dict[str, Any]] = {
    "ensemble": {"text_input": "Hello 你好"},
    "engine": {"input_ids": [5, 6, 7, 8]},
}


class Way(ABC):
    """One way; its requests go to `model`.

    Attributes:
        ends: possible outcomes of a request ended in this way, or finished before.
    """

    name: str
    model = "ensemble"
    ends: tuple[str, ...] = ("left", "complete")

    def open(self, desk: Desk, inputs: Mapping[str, Any], request_id: str) -> Conversation:
        """Return a conversation about the model's prompt and `inputs`, not sent yet."""
        return self._open(desk, {**PROMPT[self.model], **inputs}, request_id)

    def _open(self, desk: Desk, inputs: Mapping[str, Any], request_id: str) -> Conversation:
        return desk.grpc(inputs, model=self.model, request_id=request_id)

    @abstractmethod
    async def end(self, desk: Desk, conversation: Conversation, request_id: str) -> None:
        """End the request now."""


class Leaving(Way):
    """The client disconnects."""

    def __init__(self, name: str, transport: str, model: str = "ensemble") -> None:
        self.name = name
        self.model = model
        self.over_http = transport == "http"
        self._transport = transport

    def _open(self, desk: Desk, inputs: Mapping[str, Any], request_id: str) -> Conversation:
        make = {"grpc": desk.grpc, "lost": desk.lost, "http": desk.http}[self._transport]
        return make(inputs, model=self.model, request_id=request_id)

    async def end(self, desk: Desk, conversation: Conversation, request_id: str) -> None:
        await conversation.leave()


class Stop(Way):
    """A second request with the same id and `stop`, as sent by TensorRT-LLM's clients."""

    ends = ("abort", "complete")

    def __init__(self, name: str, transport: str, model: str = "ensemble") -> None:
        self.name = name
        self.model = model
        self._transport = transport

    def _open(self, desk: Desk, inputs: Mapping[str, Any], request_id: str) -> Conversation:
        make = desk.http if self._transport == "http" else desk.grpc
        return make(inputs, model=self.model, request_id=request_id)

    async def end(self, desk: Desk, conversation: Conversation, request_id: str) -> None:
        answer = await self._open(desk, {"stop": True}, request_id).run()
        assert answer.outcome == "abort", answer
        assert not answer.text


class Timeout(Way):
    """The request has a `timeout`; no action is needed."""

    ends = ("abort", "complete")

    def __init__(self, name: str, seconds: float, model: str = "ensemble") -> None:
        self.name = name
        self.model = model
        self.seconds = seconds

    def _open(self, desk: Desk, inputs: Mapping[str, Any], request_id: str) -> Conversation:
        timeout = {"timeout": round(self.seconds * 1e6)}
        return super()._open(desk, {**inputs, **timeout}, request_id)

    async def end(self, desk: Desk, conversation: Conversation, request_id: str) -> None:
        pass


WAYS: tuple[Way, ...] = (
    Leaving("gRPC stream cancelled", "grpc"),
    Leaving("gRPC connection lost", "lost"),
    Leaving("HTTP client gone", "http"),
    Leaving("engine: gRPC stream cancelled", "grpc", "engine"),
    Leaving("engine: gRPC connection lost", "lost", "engine"),
    Leaving("engine: HTTP client gone", "http", "engine"),
    Stop("stop request", "grpc"),
    Stop("HTTP: stop request", "http"),
    Stop("engine: stop request", "grpc", "engine"),
    Timeout("timeout", 0.4),
    Timeout("engine: timeout", 0.4, "engine"),
)
