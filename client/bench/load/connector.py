"""What the generator needs of a way to a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

from client.bench.errors import BenchError
from client.bench.load.prompts import Turn
from client.bench.load.scrape import Metrics

Piece = tuple[float, bytes]  # `time.monotonic()` second, what arrived


class RequestFailedError(BenchError):
    """The server has not answered as asked; `refused`: because it has too much to do."""

    def __init__(self, text: str, *, refused: bool = False) -> None:
        super().__init__(text)
        self.refused = refused


class Event(NamedTuple):
    """A part of an answer that arrived `at` a second.

    Attributes:
        new, total: output tokens in it, or so far, which takes precedence.
        is_response: whether it counts as one; else its tokens belong to the one before.
        error: the server's error message.
    """

    at: float
    text: str = ""
    new: int = 0
    total: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    is_response: bool = True


class Answer(NamedTuple):
    """An answer, decoded: tokens by arrival, and the server's counts."""

    arrivals: list[tuple[float, int]]
    text: str
    prompt_tokens: int
    cached_tokens: int


def sampling(output_tokens: int, n: int, temperature: float) -> dict[str, Any]:
    """Return the parameters of an answer of exactly `output_tokens`; sets all a model's could."""
    found: dict[str, Any] = {
        "max_tokens": output_tokens,
        "temperature": temperature,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
    }
    return found if n == 1 else {**found, "n": n}


class Connector(ABC):
    """Sends requests from one event loop; bytes are decoded apart, when there is time."""

    @abstractmethod
    async def ask(self, turn: Turn, parameters: dict[str, Any], pieces: list[Piece]) -> None:
        """Send a request and append what arrives to `pieces`, until its end.

        Raises:
            RequestFailedError, OSError: the server does not answer.
        """

    @abstractmethod
    def events(self, pieces: list[Piece]) -> Iterator[Event]:
        """Yield the events in pieces, whether the answer is complete or not.

        Raises:
            RequestFailedError: one cannot be read.
        """

    def decode(self, pieces: list[Piece]) -> Answer:
        """Read what has arrived.

        Raises:
            RequestFailedError: it is an error.
        """
        answer = Answer([], "", 0, 0)
        counted = 0
        for event in self.events(pieces):
            if event.error:
                raise RequestFailedError(event.error, refused="queue" in event.error)
            new = event.new if event.total is None else event.total - counted
            counted += new
            if new and event.is_response:
                answer.arrivals.append((event.at, new))
            elif new and answer.arrivals:
                at, before = answer.arrivals[-1]
                answer.arrivals[-1] = (at, before + new)
            answer = answer._replace(
                text=answer.text + event.text,
                prompt_tokens=max(answer.prompt_tokens, event.prompt_tokens),
                cached_tokens=max(answer.cached_tokens, event.cached_tokens),
            )
        return answer

    def metrics(self) -> Metrics | None:
        """Return what was seen of the server from inside since the last call; None: nothing."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """End all connections."""
