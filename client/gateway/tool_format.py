"""ToolFormat: in which form the servers' model calls tools, as they say."""

from __future__ import annotations

import time

from client.errors import TridentClientError
from client.gateway.errors import from_client, unsupported
from client.gateway.routing.pool import ServerPool
from client.gateway.tool_calls import FORMATS, ToolCallFormat

_KNOWN_S = 60.0  # how long what they have said is taken for true


class ToolFormat:
    """Asks the servers when it is needed, and keeps the answer for a minute."""

    def __init__(self, pool: ServerPool) -> None:
        self._pool = pool
        self._name = "none"
        self._asked_at = -_KNOWN_S

    async def get(self) -> ToolCallFormat:
        """Return the form.

        Raises:
            ApiError: it is not known, or no server answers.
        """
        if time.monotonic() - self._asked_at > _KNOWN_S:
            try:
                self._name = (await self._pool.health()).tool_call_parser
            except TridentClientError as error:
                raise from_client(error) from None
            self._asked_at = time.monotonic()
        if self._name not in FORMATS:
            raise unsupported(
                "tools",
                "not supported by this model: its chat template has none, or none in a form that "
                f"is known (tool_call_parser is {self._name})",
            )
        return FORMATS[self._name]
