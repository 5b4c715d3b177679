"""What can go wrong with a tritonserver of our own."""

from engine.errors import TridentError


class StageDiedError(TridentError):
    """A process of the server that is needed for every request has ended; a restart is due."""


class ServerStartError(TridentError):
    """tritonserver cannot be started. `hint` says what to do about it.

    Attributes:
        hint: the next step as a sentence or command; empty if the text says it all.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
