"""ClientProtocol: the client interface common to gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypedDict, Unpack

from client.protocol import Chunk, Health, Message, Prompt


class CommonRequestOptions(TypedDict, total=False):
    """The part of `RequestOptions` that a gateway takes too."""

    messages: Sequence[Message] | None
    timeout: float | None
    max_tokens: int | None
    temperature: float
    seed: int | None
    stop: str | Sequence[str]
    return_sections: bool


class ClientProtocol(Protocol):
    """A server that answers: `TridentClient` speaks with Triton, `GatewayClient` with a gateway.

    Both raise the same errors. A context manager.
    """

    def stream(
        self, prompt: Prompt | None = None, **options: Unpack[CommonRequestOptions]
    ) -> Generator[Chunk, None, None]:
        """Yield the answer piece by piece; as `TridentClient.stream`."""
        ...

    def health(self, timeout: float | None = 5.0) -> Health:
        """Return the state of what answers; as `TridentClient.health`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
