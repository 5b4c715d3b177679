"""The error of `trident bench`."""

from client.errors import TridentClientError


class BenchError(TridentClientError):
    """A measurement is impossible, or its answers are not as requested."""
