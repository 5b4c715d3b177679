"""The error of `trident bench`."""

from client.errors import TridentClientError


class BenchError(TridentClientError):
    """A measurement cannot be made, or its answers are not what was asked for."""
