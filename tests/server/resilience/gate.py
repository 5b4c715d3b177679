"""Lets workers run rounds, pause together, and continue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Open initially.

    Attributes:
        ended: whether no further round may begin.
    """

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._inside = 0
        self.ended = False

    @asynccontextmanager
    async def round(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and count as inside for the block."""
        await self._open.wait()
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def close(self) -> None:
        """Close the gate, and return when no worker is inside."""
        self._open.clear()
        while self._inside:
            await asyncio.sleep(0.02)

    def open(self) -> None:
        """Let the workers continue."""
        self._open.set()

    def end(self) -> None:
        """Let no further round begin."""
        self.ended = True
        self._open.set()
