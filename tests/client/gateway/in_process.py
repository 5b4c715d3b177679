"""A gateway called as an ASGI application, in front of a server that is not there.

Requests become the protobuf messages that a server would get, and answers come from such messages:
all of the gateway's work is done, and nothing else.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from client.aio_transport import LARGE_BYTES
from client.connection import connection
from client.exchange import Exchange
from client.gateway.app import create_app
from client.gateway.gateway import ServedModel
from client.gateway.routing.pool import ServerPool
from client.gateway.settings import GatewaySettings
from client.protocol import Chunk, Health, Tokens
from client.session import Session
from client.timeouts import Timeout
from tests.client.fake_triton import Piece, response_of
from tests.factories.costs import Cost, cost_of

_FACTS = Health(
    "ready",
    tool_call_parser="hermes",
    has_reasoning=True,
    reasoning_switches=("enable_thinking", "reasoning_effort"),
)
HELLO = (Piece({0: "Hello"}, finished=(0,), final=True),)


@dataclass(frozen=True)
class RequestCost(Cost):
    """What a request took.

    Attributes:
        status: of the answer.
        size: bytes of the body.
        answer: the body of the answer.
    """

    status: int
    size: int
    answer: bytes


class InProcess:
    """A gateway, its event loop, and what its server answers.

    Attributes:
        pieces: of the answer to every request.
        num_bytes: that the server got.
        under_way: requests that the server has, and the most that it had at once.
    """

    def __init__(self, pieces: Sequence[Piece] = HELLO, **settings: Any) -> None:
        self.pieces: Sequence[Piece] = pieces
        self.num_bytes = 0
        self.under_way = self.most_under_way = 0
        self._runner = asyncio.Runner()
        self._app = create_app(GatewaySettings(**settings))
        self.gateway = self._app.state.gateway
        self.gateway.pool = ServerPool(["a:1"], connect=self._connect)
        self.gateway.client = self.gateway.pool
        self.gateway.served_model = ServedModel(self.gateway.pool)

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST of JSON."""
        return self._runner.run(self._asked("POST", path, _encoded(body)))

    def get(self, path: str) -> tuple[int, bytes]:
        """Return status and body of the answer to a GET."""
        return self._runner.run(self._asked("GET", path, b""))

    def document(self) -> dict[str, Any]:
        """Return the OpenAPI document."""
        return self._app.openapi()

    def cost(self, path: str, body: Any, *, rounds: int = 1, memory: bool = True) -> RequestCost:
        """Return what a request takes: the least of several rounds."""
        content = _encoded(body)
        answers = []
        cost = cost_of(
            lambda: answers.append(self.ask(path, content)), rounds=rounds, memory=memory
        )
        status, answer = answers[-1]
        return RequestCost(cost.seconds, cost.peak, status, len(content), answer)

    async def _asked(self, method: str, target: str, content: bytes) -> tuple[int, bytes]:
        messages = iter([{"type": "http.request", "body": content, "more_body": False}])
        sent: list[Any] = []

        async def receive() -> Any:
            if (message := next(messages, None)) is None:
                await asyncio.Event().wait()
            return message

        async def send(message: Any) -> None:
            sent.append(message)

        path, _, query = target.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "scheme": "http",
            "server": ("a", 1),
            "client": ("b", 2),
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(content)).encode()),
            ],
            "state": {},
        }
        await self._app(scope, receive, send)
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent)

    def _connect(self, url: str, **options: Any) -> Any:
        return _Client(self, url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.gateway.responses.close()
        self._runner.close()


class _Client:
    """As `AsyncTridentClient`."""

    def __init__(self, owner: InProcess, url: str) -> None:
        self._owner = owner
        self._session = Session(connection(url, False, {}), Timeout(), None)
        self._reading = asyncio.Lock()
        self._responses: dict[tuple[int, bool], tuple[Piece, Any]] = {}

    async def stream(self, prompt: Any = None, **options: Any) -> AsyncGenerator[Chunk, None]:
        exchange = self._session.completion(prompt, **options)
        self._send(exchange)
        self._owner.under_way += 1
        self._owner.most_under_way = max(self._owner.most_under_way, self._owner.under_way)
        try:
            for piece in self._owner.pieces:
                await asyncio.sleep(0)
                has_sections = options.get("return_sections", False)
                response = self._response(piece, has_sections=has_sections)
                for chunk in await self._read(response, exchange):
                    yield chunk
        finally:
            self._owner.under_way -= 1

    async def tokenize(self, text: str | None = None, **options: Any) -> Tokens:
        self._send(self._session.tokenize(text, **options))
        return Tokens((1, 2), ("a", "b"), 4096)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        self._send(self._session.detokenize(token_ids, None))
        return "ab"

    async def health(self, timeout: float | None = None) -> Health:
        return _FACTS

    async def _read(self, response: Any, exchange: Exchange[Chunk]) -> list[Chunk]:
        """Return what a response holds; large ones are read as by `AsyncTransport`."""
        if response.ByteSize() < LARGE_BYTES:
            return exchange.read(response)
        async with self._reading:
            return await asyncio.to_thread(exchange.read, response)

    def _response(self, piece: Piece, *, has_sections: bool) -> Any:
        """Return the message of a piece; it is made once."""
        key = (id(piece), has_sections)
        if key not in self._responses:
            self._responses[key] = (piece, response_of(piece, has_sections=has_sections))
        return self._responses[key][1]

    def _send(self, exchange: Exchange[Any]) -> None:
        exchange.start()
        message = exchange.message(batched=True)
        self._owner.num_bytes += len(message.SerializeToString())


def _encoded(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()
