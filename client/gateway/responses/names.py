"""CalledName: the name of a function in the Responses API, and its name for the model."""

from __future__ import annotations

from typing import NamedTuple


class CalledName(NamedTuple):
    """How a response calls a function."""

    name: str
    namespace: str | None = None

    @property
    def of_chat(self) -> str:
        """How the model does, for which names have no parts."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"
