"""Errors of starting and running tritonserver."""

from pathlib import Path

from engine.errors import TridentError


class ServerStartError(TridentError):
    """tritonserver cannot be started.

    Args:
        message: why.
        hint: the next step as a sentence or command; empty if the message has it.
        log: the server's log file.

    Attributes:
        hint: the next step, and a line that names the log; may be empty.
    """

    def __init__(self, message: str, hint: str = "", log: Path | None = None) -> None:
        super().__init__(message)
        self.hint = "\n  ".join(filter(None, [hint, f"log: {log}" if log else ""]))
