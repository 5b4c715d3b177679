"""Anthropic's clients, called the same way; every event has the type that they declare."""

from __future__ import annotations

import asyncio
from typing import Any

from anthropic import Anthropic, AsyncAnthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


class Caller:
    """One of Anthropic's clients, called the same way."""

    def __init__(self, address: str, is_async: bool) -> None:
        self._runner = asyncio.Runner()
        self._made: Any = (AsyncAnthropic if is_async else Anthropic)(
            base_url=f"http://{address}", auth_token="none", max_retries=0
        )

    def __call__(self, route: str = "create", **arguments: Any) -> Any:
        """Return what a method of `messages` does; a stream as a list of its events."""
        answer = self._done(getattr(self._made.messages, route)(**arguments))
        if not arguments.get("stream"):
            return answer
        events = self._done(_all(answer)) if hasattr(answer, "__aiter__") else list(answer)
        return [EVENTS.validate_python(event.to_dict(), strict=True) for event in events]

    def streamed(self, **arguments: Any) -> Message:
        """Return the message that the client makes of a stream."""
        manager = self._made.messages.stream(**arguments)
        if not hasattr(manager, "__aenter__"):
            with manager as stream:
                return stream.get_final_message()

        async def last() -> Message:
            async with manager as stream:
                return await stream.get_final_message()

        return self._runner.run(last())

    def close(self) -> None:
        self._done(self._made.close())
        self._runner.close()

    def _done(self, made: Any) -> Any:
        if not asyncio.iscoroutine(made) and not hasattr(made, "__await__"):
            return made

        async def wait() -> Any:
            return await made

        return self._runner.run(wait())


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]
