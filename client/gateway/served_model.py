"""ServedModel: what the servers say of their model."""

from __future__ import annotations

import asyncio
import time

from client.errors import TridentClientError
from client.gateway.errors import from_client, unsupported
from client.gateway.routing.pool import ServerPool
from client.gateway.tool_calls import TOOL_PARSERS, ToolParser
from client.protocol import Health

_KNOWN_S = 60.0  # how long what they have said is taken for true


class ServedModel:
    """Asks the servers when it is needed, and keeps the answer.

    After a minute it asks again, and meanwhile what they said holds.
    """

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._known: Health | None = None
        self._asked_at = 0.0
        self._asking: asyncio.Task[Health] | None = None

    async def facts(self) -> Health:
        """Return what they say.

        Raises:
            ApiError: no server has answered yet.
        """
        if self._known is None:
            try:
                return await asyncio.shield(self._ask())  # who goes takes it from nobody else
            except TridentClientError as error:
                raise from_client(error) from None
        if time.monotonic() - self._asked_at > _KNOWN_S:
            self._ask()
        return self._known

    def _ask(self) -> asyncio.Task[Health]:
        """Return the question that is open; begin one if there is none."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._pool.health())
            self._asking.add_done_callback(self._told)
        return self._asking

    def _told(self, asked: asyncio.Task[Health]) -> None:
        self._asking = None
        if not asked.cancelled() and asked.exception() is None:
            self._known, self._asked_at = asked.result(), time.monotonic()

    async def tool_parser(self) -> ToolParser:
        """Return the parser of the model's tool calls.

        Raises:
            ApiError: it is not known, or no server answers.
        """
        name = (await self.facts()).tool_call_parser
        if name not in TOOL_PARSERS:
            raise unsupported(
                "tools",
                "not supported by this model: its chat template has none, or none in a form that "
                f"is known (tool_call_parser is {name})",
            )
        return TOOL_PARSERS[name]
