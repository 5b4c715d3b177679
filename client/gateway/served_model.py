"""ServedModel: what the servers say of their model."""

from __future__ import annotations

import time

from client.errors import TridentClientError
from client.gateway.errors import from_client, unsupported
from client.gateway.routing.pool import ServerPool
from client.gateway.tool_calls import FORMATS, ToolCallFormat
from client.protocol import Health

_KNOWN_S = 60.0  # how long what they have said is taken for true


class ServedModel:
    """Asks the servers when it is needed, and keeps the answer for a minute."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._known = Health("unknown")
        self._asked_at = -_KNOWN_S

    async def facts(self) -> Health:
        """Return what they say.

        Raises:
            ApiError: no server answers.
        """
        if time.monotonic() - self._asked_at > _KNOWN_S:
            try:
                self._known = await self._pool.health()
            except TridentClientError as error:
                raise from_client(error) from None
            self._asked_at = time.monotonic()
        return self._known

    async def tool_format(self) -> ToolCallFormat:
        """Return the form in which the model calls tools.

        Raises:
            ApiError: it is not known, or no server answers.
        """
        name = (await self.facts()).tool_call_parser
        if name not in FORMATS:
            raise unsupported(
                "tools",
                "not supported by this model: its chat template has none, or none in a form that "
                f"is known (tool_call_parser is {name})",
            )
        return FORMATS[name]
