"""The error of `trident bench`."""

from client.errors import TridentClientError


class BenchError(TridentClientError):
    """A measurement cannot be made, or its answers are not what was asked for.

    Attributes:
        hint: the next step as a sentence or command; empty if the text says it all.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
