"""`python -m client.bench.load.worker FD`: one load generator, a `Worker` of `generators.py`.

Receives a task from the connection FD, warms the server up, and says that it is ready. What comes
next is the second of `time.monotonic` at which the plan begins. Sends the records at the end, and
receives the next task. One whose target is the engine alone has that in its own process.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec

from client.bench.load.connector import Connector, Piece, RequestFailedError, sampling
from client.bench.load.plan import Plan, Result, Session, Task
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
        from client.bench.load.engine import EngineConnector

        return EngineConnector(target)
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
            if self._end is not None and time.monotonic() >= self._end and number > 0:
                return
            now = time.monotonic()
            if self._end is not None and intended is None and now >= self._end:
                return
            asked = Turn(before + turn.text, [] if before else turn.token_ids, turn.output_tokens)
            record = Record(session.number, number, now if intended is None else intended, now, 0)
            record.asked = turn.output_tokens * self._plan.n
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


async def ask_once(target: Target, turn: Turn) -> Record:
    """Send one request; its record may have an error."""
    connector = connector_to(target)
    try:
        plan = Plan([Session(0, [turn], 0.0)])
        (record,) = await Runner(connector, plan, time.monotonic()).run()
        return record
    finally:
        await connector.close()


async def _work(task: Task, parent: Connection) -> Result:
    connector = connector_to(task.target)
    try:
        short = [
            msgspec.structs.replace(each, output_tokens=min(_WARM_UP_TOKENS, each.output_tokens))
            for each in task.warm_up
        ]
        plan = Plan([Session(n, [turn], 0.0) for n, turn in enumerate(short)], n=task.plan.n)
        warmed = await Runner(connector, plan, time.monotonic()).run()
        for each in warmed:
            if each.error:
                return Result(error=f"the server {each.error}")
        connector.metrics()  # those of the warm-up
        parent.send(Result())
        start: float = await asyncio.to_thread(parent.recv)
        gc.collect()
        gc.freeze()  # what lives for the whole run need not be looked through in it
        records = await Runner(connector, task.plan, start).run()
        return Result(records, metrics=connector.metrics())
    finally:
        await connector.close()


def main() -> None:
    """Run one task after the other, until the other end is closed."""
    parent = Connection(int(sys.argv[1]))
    while True:
        try:
            task = parent.recv()
        except EOFError:
            return
        try:
            result = asyncio.run(_work(task, parent))
        except (TridentClientError, TridentError, OSError) as error:
            result = Result(error=str(error))
        parent.send(result)


if __name__ == "__main__":
    main()
