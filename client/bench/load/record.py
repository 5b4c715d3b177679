"""Record: what came of one request; and how servers are reached."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import msgspec

CUT = "cut"  # the error of a request that was ended with the run
Form = Literal["completions", "chat", "triton-http", "grpc", "engine"]


class Target(msgspec.Struct, frozen=True):
    """Where requests go.

    Attributes:
        form: OpenAI's completions or chats, the ensemble over HTTP or gRPC, or the engine alone.
        url: OpenAI's base URL up to `/v1`; `http://host:port`; or `host:port` of gRPC.
        model: the server's name of its model.
        takes_ids: whether completions may be asked with token ids; a server that refuses them gets
            text.
        key: sent as a bearer token, or empty.
        settings: of the engine alone.
    """

    form: Form
    url: str
    model: str
    takes_ids: bool = True
    key: str = ""
    settings: dict[str, Any] = {}


class Record(msgspec.Struct):
    """One request; times are by `time.monotonic`, which all processes share.

    Attributes:
        session, turn: which of the plan it is.
        intended: when the schedule wanted it sent; latencies count from then.
        sent: when it was.
        asked: output tokens that were asked for.
        arrivals: the time of each response with tokens, and their number.
        prompt_tokens, cached_tokens: as the server counts them; 0 if it does not report them.
        error: why there is no complete answer.
        refused: whether the server said that it has too much to do.
    """

    session: int
    turn: int
    intended: float
    sent: float
    asked: int
    arrivals: list[tuple[float, int]] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    refused: bool = False

    @property
    def num_tokens(self) -> int:
        """Output tokens that arrived."""
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.arrivals[0][0] - self.intended

    @property
    def latency(self) -> float:
        """Seconds to the last token."""
        return self.arrivals[-1][0] - self.intended

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive responses."""
        return [late - early for (early, _), (late, _) in pairwise(self.arrivals)]

    @property
    def token_time(self) -> float:
        """Mean seconds per token after the first response; 0 if there are none."""
        later = self.num_tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / later if later else 0.0
