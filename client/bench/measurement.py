"""Wave: the measurement of one wave of requests, on the engine alone or the ensemble."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wave:
    """Requests sent at once, measured from the first one sent to the last token received.

    Attributes:
        streams: number of requests.
        num_tokens: output tokens of all requests.
        seconds: wall time.
        cpu_seconds: CPU time by process.
        ttfts: time to first token per request, in seconds; this and the following: ensemble only.
        gaps: seconds between consecutive responses of a request, over all requests.
        num_responses: responses with tokens.
    """

    streams: int
    num_tokens: int
    seconds: float
    cpu_seconds: dict[str, float]
    ttfts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_responses: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.num_tokens / self.seconds
