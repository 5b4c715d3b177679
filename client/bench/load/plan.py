"""Plan: a workload's requests, drawn; what a generator process gives."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec

from client.bench.errors import BenchError
from client.bench.load.prompts import PromptSource, Turn
from client.bench.load.record import Record
from client.bench.load.scrape import Metrics
from client.bench.load.workload import Workload

_HASHED = 512  # tokens of a prompt that one of a trace's `hash_ids` stands for


class Session(msgspec.Struct):
    """Requests that follow each other, the first at `start` seconds; None: when a user is free."""

    number: int
    turns: list[Turn]
    start: float | None = None


class Plan(msgspec.Struct):
    """All requests of a run, and how they are sent.

    Attributes:
        concurrency: users of a closed loop; None if the sessions have their times.
        history, n, temperature, duration: as of `Workload`.
    """

    sessions: list[Session]
    concurrency: int | None = None
    history: bool = False
    n: int = 1
    temperature: float = 0.0
    duration: float | None = None

    @property
    def is_cut(self) -> bool:
        """Whether its end is a moment, not the last answer."""
        return self.concurrency is not None and self.duration is not None

    def parts(self, count: int) -> list[Plan]:
        """Deal the sessions, and the users, out to `count` generators."""
        users = range(self.concurrency or 0)
        return [
            msgspec.structs.replace(
                self,
                sessions=self.sessions[index::count],
                concurrency=self.concurrency and len(users[index::count]),
            )
            for index in range(count)
        ]


class Result(msgspec.Struct):
    """What a generator reports; `error`: why it has not run; `metrics` of the engine alone."""

    records: list[Record] = []
    error: str = ""
    metrics: Metrics | None = None


def draw(workload: Workload, source: PromptSource, seed: str) -> Plan:
    """Return the plan of `workload` that `seed` determines.

    Raises:
        BenchError: the trace cannot be read, or a prompt cannot be made.
    """
    if workload.trace is not None:
        sessions = read_trace(workload.trace, source)
        if workload.duration is not None:
            sessions = [each for each in sessions if (each.start or 0.0) < workload.duration]
    else:
        generator = random.Random(seed)
        beginning = source.words(f"{seed}/shared", workload.shared)

        def turn(number: int, index: int) -> Turn:
            if workload.prompt_text:
                text = workload.prompt_text.replace("{n}", str(number))
                return source.encode(text, workload.output.draw(generator))
            lengths = (workload.prompt.draw(generator), workload.output.draw(generator))
            return source.turn(f"{seed}/{number}/{index}", *lengths, beginning)

        sessions = [
            Session(number, [turn(number, index) for index in range(workload.turns)], start)
            for number, start in enumerate(_starts(workload, generator))
        ]
    return Plan(
        sessions,
        concurrency=workload.concurrency,
        history=workload.history,
        n=workload.n,
        temperature=workload.temperature,
        duration=workload.duration,
    )


def _starts(workload: Workload, generator: random.Random) -> list[float | None]:
    if workload.concurrency is not None:
        return [None] * workload.sessions
    if workload.rate is None:
        return [workload.gap * number for number in range(workload.sessions)]
    starts: list[float | None] = []
    at = 0.0
    while len(starts) < workload.sessions if workload.duration is None else at < workload.duration:
        starts.append(at)
        at += generator.expovariate(workload.rate) if workload.poisson else 1 / workload.rate
    return starts


class _Line(msgspec.Struct):
    """A line of a trace: milliseconds, tokens, and the ids of the prompt's blocks of 512."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, source: PromptSource) -> list[Session]:
    """Return the requests of a trace: prompts with equal `hash_ids` have equal beginnings.

    Raises:
        BenchError: it cannot be read; names the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    sessions = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BenchError(f"--trace: cannot read {path}: {error.strerror}") from None
    for number, text in enumerate(lines):
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BenchError(f"--trace: {path}, line {number + 1}: {error}") from None
        if line.input_length < 1 or line.output_length < 1 or line.timestamp < 0:
            raise BenchError(f"--trace: {path}, line {number + 1}: lengths must be at least 1")
        beginning = [word for each in line.hash_ids for word in source.words(str(each), _HASHED)]
        lengths = (line.input_length, line.output_length)
        turn = source.turn(f"{path.name}/{number}", *lengths, beginning)
        sessions.append(Session(number, [turn], line.timestamp / 1000))
    if not sessions:
        raise BenchError(f"--trace: {path} has no requests")
    return sessions
