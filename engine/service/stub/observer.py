"""Observer: who hears what becomes of the engine."""

from __future__ import annotations

from typing import Protocol

from engine.protocol import Stats


class Observer(Protocol):
    """Hears what happens to the engine; its methods return at once."""

    def update(self, stats: Stats) -> None:
        """Take what the engine did since the last time."""

    def engine_up(self, up: bool) -> None:
        """Take whether requests are served from now on."""

    def engine_restarted(self) -> None:
        """Count a start of the process after the first."""

    def requests_lost(self, count: int) -> None:
        """Count sequences that ended with the process."""


class Unobserved:
    """An `Observer` that forgets."""

    def update(self, stats: Stats) -> None:
        """Do nothing, as the others."""

    def engine_up(self, up: bool) -> None: ...
    def engine_restarted(self) -> None: ...
    def requests_lost(self, count: int) -> None: ...
