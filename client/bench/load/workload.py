"""Workload: what users ask, and when; lengths are distributions of numbers of tokens."""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from client.bench.errors import BenchError

_LENGTHS = "must be N, LOW-HIGH (uniform) or lognormal:MEDIAN:SIGMA, in tokens"


@dataclass(frozen=True)
class Lengths:
    """Uniform between `low` and `high`, or with a `sigma` log-normal around `low`; at least 1."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, flag: str, text: str) -> Lengths:
        """Read `128`, `16-512` or `lognormal:256:0.8`.

        Raises:
            BenchError: it is none of these; names `flag`.
        """
        try:
            if text.startswith("lognormal:"):
                _, median, sigma = text.split(":")
                found = cls(int(median), int(median), float(sigma))
            else:
                low, _, high = text.partition("-")
                found = cls(int(low), int(high or low))
        except ValueError:
            raise BenchError(f"{flag}: {_LENGTHS} (got {text!r})") from None
        if not (1 <= found.low <= found.high and 0 <= found.sigma < math.inf):
            raise BenchError(f"{flag}: {_LENGTHS} (got {text!r})")
        return found

    def draw(self, generator: random.Random) -> int:
        """Return one of them."""
        if self.sigma:
            return max(1, round(self.low * math.exp(generator.gauss(0, self.sigma))))
        return generator.randint(self.low, self.high)

    def __str__(self) -> str:
        if self.sigma:
            return f"lognormal:{self.low}:{self.sigma:g}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True)
class Workload:
    """Sessions, each of `turns` requests one after the other.

    With `concurrency` it is a closed loop: so many users, each of whom begins a session when the
    last one has ended. Else it is open: sessions begin at their time, whatever the server does,
    `rate` per second or `gap` seconds apart (0: all at once).

    Attributes:
        name: shown in tables.
        sessions: their number; with a `rate` and a `duration`, what fits into it.
        prompt, output: tokens of each prompt, shared ones included, and of each answer.
        poisson: whether arrivals at a rate are random; else they are equally far apart.
        shared: length of the prefix that all prompts share.
        history: whether each turn's prompt begins with the session so far, answers included.
        n: answers per request.
        prompt_text: sent instead of random words; `{n}` is the number of the session.
        trace: a file of requests instead, in the form of Mooncake's traces.
        duration: seconds after which no request is sent; in a closed loop what still runs then is
            ended, and counts until then.
    """

    name: str
    sessions: int
    prompt: Lengths
    output: Lengths
    turns: int = 1
    concurrency: int | None = None
    rate: float | None = None
    poisson: bool = True
    gap: float = 0.0
    shared: int = 0
    history: bool = False
    n: int = 1
    temperature: float = 0.0
    prompt_text: str = ""
    trace: Path | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.shared and self.shared >= self.prompt.low:
            raise BenchError(
                f"--shared-tokens: must be fewer than the tokens of a prompt, {self.prompt.low} "
                f"(got {self.shared})"
            )

    @property
    def description(self) -> str:
        """The workload as text."""
        if self.trace is not None:
            return f"the requests of {self.trace}"
        if self.rate is not None:
            kind = "at random" if self.poisson else "evenly"
            when = f"{self.rate:g} sessions/s, {kind}"
        elif self.concurrency is not None:
            when = f"{self.concurrency} streams, {self.sessions} sessions"
        else:
            apart = f" {self.gap:g} s apart" if self.gap else " at once"
            when = f"{self.sessions} users{apart}"
        lengths = f"{self.prompt} in, {self.output} out"
        if self.shared:
            lengths = f"{self.shared} shared of {lengths}"
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        many = f", n={self.n}" if self.n > 1 else ""
        return f"{when}{turns}, {lengths}{many}"


def closed(
    name: str, streams: int, requests: int, prompt: int, output: int, shared: int = 0
) -> Workload:
    """Return a closed loop of single requests of one length."""
    lengths = (Lengths(prompt, prompt), Lengths(output, output))
    return Workload(name, requests, *lengths, concurrency=streams, shared=shared)


def _at_once(name: str, users: int, output: str, **fields: object) -> Workload:
    made = Workload(name, users, Lengths(16, 48), Lengths.parse(name, output))
    return replace(made, **fields)  # type: ignore[arg-type]


STANDARD = (
    closed("W1", 1, 4, 128, 64),
    closed("W2", 16, 32, 128, 64),
    closed("W3", 64, 64, 128, 64),
    closed("W4", 16, 16, 1024, 32),
    closed("W5", 16, 32, 1056, 32, shared=1024),
)

# What others have published; the shapes are theirs, the prompts random words.
PUBLISHED = (
    _at_once("single", 1, "200", temperature=0.8),
    _at_once("generate-64", 64, "100", temperature=1.0),
    _at_once("parallel-64", 64, "200", temperature=1.0),
    _at_once("staggered-64", 64, "200", gap=0.07),
    _at_once("staggered-128", 128, "200", gap=0.07),
    _at_once("users-16", 16, "200", temperature=0.8),
    _at_once("users-32", 32, "200", temperature=0.8),
    _at_once("threads-100", 100, "64", prompt_text="Tell me a joke for user {n}"),
    *(
        _at_once(f"sessions-{n}", n, "32", turns=64, concurrency=n, temperature=0.8)
        for n in range(1, 10)
    ),
    Workload("kv-waste", 64, Lengths(16, 512), Lengths(16, 512), concurrency=32, temperature=0.8),
    replace(closed("parallel-sampling", 8, 8, 256, 96), n=4, temperature=1.0),
    Workload("batching-ladder", 48, Lengths(16, 128), Lengths(8, 160), concurrency=16),
)
_STREAMS = tuple(closed(f"S{n}", n, n, 256, 32) for n in (1, 2, 4, 8, 16, 32, 64, 128))
_LONGER = tuple(closed(f"C{n}", 4, 4, n, 32) for n in (512, 1024, 2048, 4096, 8192))
GROWTH = (*_STREAMS, *_LONGER)
BY_NAME = {each.name: each for each in (*STANDARD, *PUBLISHED, *GROWTH)}
GROUPS = {"standard": STANDARD, "published": PUBLISHED, "growth": GROWTH}


def named(names: str) -> list[Workload]:
    """Return the workloads, or groups of them, that are named between commas.

    Raises:
        BenchError: there is no such workload.
    """
    found: list[Workload] = []
    for name in (part.strip() for part in names.split(",")):
        if name in GROUPS:
            found += GROUPS[name]
        elif name in BY_NAME:
            found.append(BY_NAME[name])
        else:
            raise BenchError(
                f"--workload: {name} is unknown; known are {', '.join((*GROUPS, *BY_NAME))}"
            )
    return list(dict.fromkeys(found))


def tiny(workload: Workload) -> Workload:
    """Return a small form of `workload`, to try a server or the benchmark itself on."""

    def cut(lengths: Lengths, most: int) -> Lengths:
        return Lengths(min(lengths.low, most), min(lengths.high, most), lengths.sigma)

    streams = workload.concurrency
    return replace(
        workload,
        sessions=min(workload.sessions, 4),
        prompt=cut(workload.prompt, 24),
        output=cut(workload.output, 8),
        turns=min(workload.turns, 2),
        concurrency=None if streams is None else min(streams, 4),
        shared=min(workload.shared, 16),
    )


def numbers(flag: str, text: str) -> tuple[float, ...]:
    """Read positive numbers separated by commas; there may be none.

    Raises:
        BenchError: it is something else; names `flag`.
    """
    if not text:
        return ()
    if not re.fullmatch(r"[\d.]+(,[\d.]+)*", text):
        raise BenchError(f"{flag}: must be numbers such as 1,16,64 (got {text!r})")
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (0.0,)
    if min(found) <= 0:
        raise BenchError(f"{flag}: must be numbers above 0 (got {text!r})")
    return found
