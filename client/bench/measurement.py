"""Wave: what one wave of requests took; the same for the engine alone and for the ensemble."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wave:
    """So many requests made at once, from the first one sent to the last token received.

    Attributes:
        streams: the requests.
        num_tokens: output tokens of all requests.
        seconds: wall time.
        cpu_seconds: CPU time by process.
        ttfts: seconds to the first token, per request; as all that follow, ensemble only.
        gaps: seconds between two responses of a request, over all requests.
        num_responses: that carried tokens.
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
