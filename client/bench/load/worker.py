"""What the process of a load generator does: it asks a server, by a plan, and notes the answers."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import msgspec

from client.bench.load.connector import Connector, Piece, RequestFailedError, sampling
from client.bench.load.plan import Plan, Result, Session
from client.bench.load.prompts import Turn
from client.bench.load.record import CUT, Record, Target
from client.errors import TridentClientError
from engine.errors import TridentError

_WARM_UP_TOKENS = 4
_ANSWER_TIMEOUT_S = 3600.0  # no answer takes this long: the server hangs
_DRAIN_S = 60.0  # that answers may take after the last request of a run with a duration


def connector_to(target: Target) -> Connector:
    """Return the way to a target; in a running event loop."""
    if target.form == "engine":
        from client.bench.load.engine import engine_of

        return engine_of(msgspec.json.encode(target.settings))
    if target.form == "grpc":
        from client.bench.load.grpc import GrpcConnector

        return GrpcConnector(target)
    from client.bench.load.http import HttpConnector

    return HttpConnector(target)


class Runner:
    """Runs a plan against a target, from `start`, a second of `time.monotonic`."""

    def __init__(self, connector: Connector, plan: Plan, start: float) -> None:
        self._connector = connector
        self._plan = plan
        self._start = start
        self._end = None if plan.duration is None else start + plan.duration
        self._found: list[tuple[Record, list[Piece]]] = []

    async def run(self) -> list[Record]:
        """Return the records of all requests that were sent."""
        plan = self._plan
        if plan.concurrency is None:
            tasks = [asyncio.create_task(self._at_its_time(each)) for each in plan.sessions]
        else:
            waiting = iter(plan.sessions)
            users = range(plan.concurrency)
            tasks = [asyncio.create_task(self._user(waiting)) for _ in users]
        if tasks:
            await self._wait(tasks)
        for record, pieces in self._found:
            self._read(record, pieces)
        return [record for record, _ in self._found]

    async def _wait(self, tasks: list[asyncio.Task[None]]) -> None:
        timeout = None
        if self._end is not None:
            grace = 0.0 if self._plan.is_cut else _DRAIN_S
            timeout = self._end + grace - time.monotonic()
        done, left = await asyncio.wait(tasks, timeout=timeout)
        for each in left:
            each.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for each in done:
            each.result()  # a defect of the generator's

    async def _at_its_time(self, session: Session) -> None:
        assert session.start is not None
        intended = self._start + session.start
        await asyncio.sleep(max(0.0, intended - time.monotonic()))
        await self._ask_all(session, intended)

    async def _user(self, waiting: Iterator[Session]) -> None:
        await asyncio.sleep(max(0.0, self._start - time.monotonic()))
        for session in waiting:
            await self._ask_all(session, None)

    async def _ask_all(self, session: Session, intended: float | None) -> None:
        """Ask a session's turns; the first was intended at a time, others when one has ended."""
        before = ""
        for number, turn in enumerate(session.turns):
            now = time.monotonic()
            if self._end is not None and intended is None and now >= self._end:
                return
            asked = Turn(before + turn.text, [] if before else turn.token_ids, turn.output_tokens)
            tokens = turn.output_tokens * self._plan.n
            at = now if intended is None else intended
            record = Record(session.number, number, at, now, tokens)
            intended = None
            pieces = await self._ask(asked, record)
            if self._plan.history:
                before = asked.text + self._read(record, pieces)

    async def _ask(self, turn: Turn, record: Record) -> list[Piece]:
        pieces: list[Piece] = []
        self._found.append((record, pieces))
        plan = self._plan
        try:
            parameters = sampling(turn.output_tokens, plan.n, plan.temperature)
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                await self._connector.ask(turn, parameters, pieces)
        except TimeoutError:
            record.error = f"has not answered in {_ANSWER_TIMEOUT_S:g} s"
        except asyncio.CancelledError:
            record.error = CUT if plan.is_cut else "not answered when the run ended"
            raise
        except RequestFailedError as error:
            record.error, record.refused = str(error), error.refused
        except OSError as error:
            record.error = str(error)
        return pieces

    def _read(self, record: Record, pieces: list[Piece]) -> str:
        """Decode an answer into its record; return its text."""
        try:
            answer = self._connector.decode(pieces)
        except RequestFailedError as error:
            record.error, record.refused = str(error), error.refused
            return ""
        record.arrivals = answer.arrivals
        record.prompt_tokens, record.cached_tokens = answer.prompt_tokens, answer.cached_tokens
        if not record.error and record.num_tokens != record.asked:
            record.error = (
                f"answered with {record.num_tokens} tokens where {record.asked} were asked"
            )
        return answer.text


async def ask_all(target: Target | Connector, plan: Plan, start: float | None = None) -> Result:
    """Run a plan from `start` on, a second of `time.monotonic`; by default now."""
    connector = target if isinstance(target, Connector) else connector_to(target)
    connector.metrics()  # those of before
    try:
        records = await Runner(connector, plan, time.monotonic() if start is None else start).run()
        return Result(records, metrics=connector.metrics())
    finally:
        await connector.close()


_LOOP = asyncio.Runner()
_ready: list[tuple[Connector, Plan]] = []  # what `run` runs


def prepare(target: Target, plan: Plan, warm_up: Sequence[Turn]) -> Result:
    """Ask what warms a target up, before its plan. The engine alone runs in this process."""
    return _told(_prepare(target, plan, warm_up))


def run(start: float) -> Result:
    """Run the plan of the target last prepared from `start` on, a second of `time.monotonic`."""
    return _told(ask_all(*_ready.pop(), start))


def _told(work: Coroutine[Any, Any, Result]) -> Result:
    try:
        return _LOOP.run(work)
    except (TridentClientError, TridentError, OSError) as error:
        return Result(error=str(error))


async def _prepare(target: Target, plan: Plan, warm_up: Sequence[Turn]) -> Result:
    connector = connector_to(target)
    _ready[:] = [(connector, plan)]
    short = [
        Turn(each.text, each.token_ids, min(_WARM_UP_TOKENS, each.output_tokens))
        for each in warm_up
    ]
    first = Plan([Session(number, [turn], 0.0) for number, turn in enumerate(short)], n=plan.n)
    warmed = await Runner(connector, first, time.monotonic()).run()
    gc.collect()
    gc.freeze()  # what lives for the whole run need not be looked through in it
    return Result(error=next((f"the server {each.error}" for each in warmed if each.error), ""))
