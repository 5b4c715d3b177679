"""Generation: the server requests that one request of a client becomes, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from client.errors import InvalidRequestError, TridentClientError
from client.gateway.errors import from_client
from client.gateway.openai.protocol import CompletionTokensDetails, PromptTokensDetails, Usage
from client.gateway.routing.pool import ServerPool
from client.gateway.schemas.limits import (
    MAX_CHAT_CHARACTERS,
    MAX_MESSAGES,
    MAX_SAMPLING_CHARACTERS,
)
from client.gateway.security.tenant_client import TenantClient
from client.protocol import ChatParameters, Chunk, Json, Message, Prompt
from client.request import json_text

AT_ONCE = 32  # requests of one client's request: enough for the stages, and others wait for no more
_READ = ("cache_salt", "tenant")  # what is read of the sampling parameters before they are sent


@dataclass(frozen=True)
class Generation:
    """One request to the server: a prompt to continue, or a chat to answer.

    Attributes:
        request_id: its own; nobody else's, so that ending it ends no other.
        sampling: sampling parameters.
        names: as in `from_client`.
        reasoning_effort: of a chat, as `chat.effort` takes it.
    """

    request_id: str
    sampling: Mapping[str, Any]
    prompt: Prompt | None = None
    messages: Sequence[Message] | None = None
    chat_parameters: ChatParameters | None = None
    priority: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    reasoning_effort: str | None = None

    async def chunks(self, client: ServerPool | TenantClient) -> AsyncGenerator[Chunk, None]:
        """Yield the answer piece by piece. Closing or cancelling it ends the request.

        Raises:
            ApiError: the server refuses it, or fails.
        """
        try:
            options: Any = encoded(self.sampling)
            check_chat(self.messages, self.chat_parameters)
            stream = client.stream(
                self.prompt,
                messages=self.messages,
                chat_parameters=self.chat_parameters,
                priority=self.priority,
                request_id=self.request_id,
                **options,
            )
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk
        except TridentClientError as error:
            raise from_client(error, self.names) from None


def encoded(sampling: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return sampling parameters whose large values are JSON, which many requests may share.

    Raises:
        InvalidRequestError: they are more than the engine takes.
    """
    made = {
        name: Json(json_text(name, value))
        if isinstance(value, dict | list) or (isinstance(value, str) and name not in _READ)
        else value
        for name, value in sampling.items()
    }
    sizes = {name: len(value.text) for name, value in made.items() if isinstance(value, Json)}
    if (total := sum(sizes.values())) > MAX_SAMPLING_CHARACTERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequestError(
            f"has {sizes[largest]} of the {total} characters of the sampling "
            f"parameters; at most {MAX_SAMPLING_CHARACTERS} are allowed in all",
            param=largest,
        )
    return made


def check_chat(messages: Sequence[Message] | None, parameters: Mapping[str, Any] | None) -> None:
    """Check how much the chat template gets.

    Raises:
        InvalidRequestError: it is more than the server takes.
    """
    if messages is not None and len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"has {len(messages)} messages; at most {MAX_MESSAGES} are allowed", param="messages"
        )
    sizes = {name: len(msgspec.json.encode(each)) for name, each in (parameters or {}).items()}
    if sum(sizes.values()) > MAX_CHAT_CHARACTERS:
        largest = max(sizes, key=sizes.__getitem__)
        raise InvalidRequestError(
            f"has {sizes[largest]} bytes of JSON; at most {MAX_CHAT_CHARACTERS} are allowed",
            param=largest,
        )


async def merged(
    client: ServerPool | TenantClient,
    generations: Sequence[Generation],
    check: Callable[[Chunk], None] = lambda _: None,
    *,
    at_once: int = AT_ONCE,
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the pieces of all answers as they come, each with the number of its request.

    If one request fails, or the generator is closed, all end. Of who reads slowly, as many pieces
    as there are answers at once wait here, and then the servers.

    Args:
        check: is called with each piece before any more of them come, and may raise `ApiError`.
        at_once: how many are under way.

    Raises:
        ApiError: of the first that fails.
    """
    if len(generations) == 1:
        async with aclosing(generations[0].chunks(client)) as chunks:
            async for chunk in chunks:
                check(chunk)
                yield 0, chunk
        return
    # None is the end of all of them.
    pieces: asyncio.Queue[tuple[int, Chunk] | None] = asyncio.Queue(at_once)
    free = asyncio.Semaphore(at_once)

    async def follow(number: int) -> None:
        async with free, aclosing(generations[number].chunks(client)) as chunks:
            async for chunk in chunks:
                check(chunk)
                await pieces.put((number, chunk))

    async def follow_all() -> None:
        # No `TaskGroup`: its error and the first one in it would keep each other, and both the
        # body of the request, until the next garbage collection.
        tasks = [asyncio.create_task(follow(number)) for number in range(len(generations))]
        try:
            await asyncio.gather(*tasks)
        except Exception:  # nobody reads any more where it is cancelled
            await _ended(tasks)
            await pieces.put(None)
            raise
        finally:
            await _ended(tasks)
        await pieces.put(None)

    following = asyncio.create_task(follow_all())
    try:
        while (piece := await pieces.get()) is not None:
            yield piece
        await following
    finally:
        await _ended([following])
        del following  # it keeps its error, and an error this frame


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel tasks, wait for their end and forget them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


@dataclass
class UsageCount:
    """Counts the tokens of the answers to one request of a client."""

    _prompt: dict[int, int] = field(default_factory=dict)
    _cached: dict[int, int] = field(default_factory=dict)
    _completion: int = 0
    _reasoning: int | None = None

    def add(self, number: int, chunk: Chunk) -> None:
        """Count a piece of the answer to request `number`."""
        self._prompt[number] = chunk.num_input_tokens
        self._completion += chunk.num_output_tokens
        if chunk.index == 0 and chunk.finish_reason is not None:
            # The other sequences share what the first has computed.
            self._cached[number] = chunk.num_cached_tokens
        if chunk.sections is not None:
            tokens = (part.num_tokens for part in chunk.sections if part.type == "reasoning")
            self._reasoning = sum(tokens, start=self._reasoning or 0)

    def usage(self) -> Usage:
        """Return what has been counted."""
        prompt = sum(self._prompt.values())
        return Usage(
            prompt,
            self._completion,
            prompt + self._completion,
            PromptTokensDetails(sum(self._cached.values())),
            UNSET if self._reasoning is None else CompletionTokensDetails(self._reasoning),
        )
