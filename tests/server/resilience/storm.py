"""A soak of `trident serve`: valid, hostile and cancelled requests while its processes are killed.

    python -m tests.server.resilience.storm --minutes 10

Each process behind the launcher is killed (SIGKILL) or stopped for 3 s (SIGSTOP), one after the
other. Each request must have exactly one end: a whole answer, an error, or, only where the gateway
itself was struck, a closed connection. After each strike service must go on within a minute.
Afterwards nothing runs, waits or holds a block, no shared memory of a dead process is left, and the
processes that lived through it have not grown. Last, the launcher is killed: nothing may stay.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from itertools import chain, cycle
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from tests.server.resilience import report
from tests.server.resilience.gate import Gate
from tests.server.resilience.hostile_bodies import HOSTILE, MODEL, HostileBody
from tests.server.resilience.launched import Running, launched
from tests.server.resilience.observe import GAUGES, until
from tests.server.resilience.processes import is_alive
from tests.server.resilience.service import checkpoint
from tests.server.resilience.trend import MIB, Trend, allowed_growth

_WORKERS = 24
_REQUEST_TIMEOUT_S = 90.0
_STOPPED_S = 3.0
_CALM_S = 15.0  # between service going on and the next strike
_MEASUREMENTS = 3  # in that time
# Of memory in half of a run. Objects that outlive a burst keep whole arenas of Python's allocator:
# what is traced stays at 50 MB, plain traffic at 73 MiB. 2 KiB for each of 9,000 requests are more.
_ARENAS_BYTES = 16 * MIB
_SERVING_WITHIN_S = 60.0
_GONE_WITHIN_S = 20.0
_SHARE_HOSTILE, _SHARE_CANCELLED = 0.1, 0.25
_EXAMPLES = 3
# Roles as in `members`, in the order in which they are struck; the gateway at the begin alone, so
# that the growth of its memory can be judged.
FIRST: tuple[tuple[str, signal.Signals], ...] = (
    ("gateway", signal.SIGSTOP),
    ("gateway", signal.SIGKILL),
)
STRIKES: tuple[tuple[str, signal.Signals], ...] = (
    ("engine process", signal.SIGKILL),
    ("detokenizer", signal.SIGSTOP),
    ("tritonserver", signal.SIGKILL),
    ("engine process", signal.SIGSTOP),
    ("tokenizer", signal.SIGKILL),
    ("tokenizer", signal.SIGSTOP),
    ("engine", signal.SIGKILL),
    ("detokenizer", signal.SIGKILL),
)


class Stream:
    """The events of one streamed answer, as they come.

    Attributes:
        error: the first error event.
    """

    def __init__(self) -> None:
        self._num_done = 0  # of `[DONE]`, which follows the last event of OpenAI's APIs
        self._num_last = 0  # of `message_stop`, `response.completed` and the like
        self.error = ""
        self._buffer = b""

    def feed(self, piece: bytes) -> None:
        """Take bytes of the body, cut anywhere."""
        *lines, self._buffer = (self._buffer + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                self._event(line.removeprefix(b"data: "))

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._num_done += 1
            return
        event = json.loads(data)
        kind = event.get("type")
        if "error" in event and event["error"] is not None:
            self.error = self.error or json.dumps(event["error"])
            self._num_last += kind == "error"  # Anthropic's has no other end
        elif kind in _LAST_EVENTS:
            self._num_last += 1
            if kind == "response.failed":
                self.error = json.dumps(event["response"]["error"])

    @property
    def outcome(self) -> str:
        """`complete`, `error event`, `cut off` or `ended more than once`."""
        if max(self._num_done, self._num_last) > 1:
            return "ended more than once"
        if not (self._num_done or self._num_last):
            return "cut off"
        return "error event" if self.error else "complete"


_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")


def body_of(route: str, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return path and body of a valid request, streamed or not."""
    limit = rng.randint(1, 300)
    text = f"{rng.random()} " + "Some words. " * rng.randint(0, 60)
    messages = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "stream": rng.random() < 0.7}
    if route == "responses":
        return "/v1/responses", {**body, "input": text, "max_output_tokens": max(16, limit)}
    if route == "messages":
        return "/v1/messages", {**body, "messages": messages, "max_tokens": limit}
    sampling = {"max_tokens": limit, "ignore_eos": True, "temperature": rng.choice([0.0, 1.0])}
    if route == "completions":
        return "/v1/completions", {**body, "prompt": text, "n": rng.randint(1, 3), **sampling}
    return "/v1/chat/completions", {**body, "messages": messages, **sampling}


ROUTES = ("chat", "completions", "responses", "messages")


@dataclass
class Result:
    """What was sent, how long service was away, what grew, and what should not have happened."""

    outcomes: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    trends: list[tuple[str, str, Trend]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def problem(self, kind: str, text: str) -> None:
        """Keep a problem, if there are not several of its kind already."""
        if sum(each.startswith(kind) for each in self.problems) < _EXAMPLES:
            self.problems.append(f"{kind}: {text}")

    def show(self) -> None:
        """Print the tables."""
        report.show("Requests", ("kind: outcome", "count"), sorted(self.outcomes.items()))
        rows = [(k, len(v), median(v), max(v)) for k, v in self.recoveries.items()]
        report.show("Until a request was answered", ("struck", "times", "median s", "max s"), rows)
        columns = ("process", "measure", "start", "end", "verdict")
        report.show("Of processes that lived through it (MiB)", columns, self._trend_rows())

    def _trend_rows(self) -> Iterator[tuple[object, ...]]:
        for role, measure, trend in self.trends:
            scale = 1 if measure == "descriptors" else MIB
            verdict = "flat" if trend.is_flat else "GROWS"
            yield role, measure, trend.start / scale, trend.end / scale, verdict


class Storm:
    """Workers that send requests of every kind through the gateway of a running server."""

    def __init__(self, running: Running, session: aiohttp.ClientSession, seed: int) -> None:
        self.result = Result()
        self.gate = Gate()
        self._running = running
        self._session = session
        self._rng = random.Random(seed)
        self._gateway_strikes = 0
        self._gateway_is_struck = False

    @contextlib.asynccontextmanager
    async def raging(self, workers: int) -> AsyncIterator[None]:
        """Run the workers in the block."""
        tasks = [asyncio.create_task(self._work()) for _ in range(workers)]
        try:
            yield
        finally:
            self.gate.end()
            for error in await asyncio.gather(*tasks, return_exceptions=True):
                if error is not None:
                    self.result.problem("a worker ended", repr(error))

    async def _work(self) -> None:
        while not self.gate.ended:
            async with self.gate.round():
                choice = self._rng.random()
                if choice < _SHARE_HOSTILE:
                    await self._hostile(self._rng.choice(HOSTILE))
                else:
                    await self._valid(cancelled=choice < _SHARE_HOSTILE + _SHARE_CANCELLED)

    async def _hostile(self, hostile: HostileBody) -> None:
        strikes = self._gateway_strikes
        body = await asyncio.to_thread(hostile.body)
        outcome, text = await self._send(hostile.path, body, streamed=False)
        self._record(f"hostile, {hostile.name}", outcome, text, strikes)
        await asyncio.sleep(0.2)

    async def _valid(self, *, cancelled: bool) -> None:
        route = self._rng.choice(ROUTES)
        path, body = body_of(route, self._rng)
        strikes = self._gateway_strikes
        sending = asyncio.create_task(
            self._send(path, json.dumps(body).encode(), streamed=body["stream"])
        )
        if cancelled:
            await asyncio.wait([sending], timeout=self._rng.uniform(0, 1.5))
            if sending.cancel():
                await asyncio.gather(sending, return_exceptions=True)
                self.result.outcomes[f"{route}: left"] += 1
                return
        outcome, text = await sending
        self._record(route, outcome, text, strikes)
        if outcome.startswith("4") and outcome != "429":
            self.result.problem(f"{route}: a valid request was refused", text)
        if outcome not in ("complete", "200"):
            await asyncio.sleep(0.2)  # as a client does that tries again

    async def _send(self, path: str, body: bytes, *, streamed: bool) -> tuple[str, str]:
        """Return how one request ended, and what is known about it."""
        stream = Stream()
        try:
            async with (
                asyncio.timeout(_REQUEST_TIMEOUT_S),
                self._session.post(
                    f"http://{self._running.openai_url}{path}", data=io.BytesIO(body)
                ) as response,
            ):
                if response.status != 200 or not streamed:
                    return str(response.status), (await response.text())[:300]
                async for piece, _ in response.content.iter_chunks():
                    stream.feed(piece)
        except TimeoutError:
            return "no end", f"within {_REQUEST_TIMEOUT_S} s"
        except (aiohttp.ClientError, OSError) as error:
            return "connection closed", repr(error)
        return stream.outcome, stream.error

    def _record(self, kind: str, outcome: str, text: str, strikes: int) -> None:
        self.result.outcomes[f"{kind}: {outcome}"] += 1
        was_struck = self._gateway_is_struck or strikes != self._gateway_strikes
        if not is_an_end(outcome, gateway_was_struck=was_struck):
            self.result.problem(f"{kind}: {outcome}", text)

    async def strike(self, role: str, number: signal.Signals) -> None:
        """Kill the process with `role`, or stop it for a while, and wait for service to go on."""
        victim = members(self._running).get(role)
        what = f"{role}: {number.name}"
        if victim is None:
            self.result.problem(what, "it was not there")
            return
        self._gateway_strikes += role == "gateway"
        self._gateway_is_struck = role == "gateway"
        victim.send_signal(number)
        if number == signal.SIGSTOP:
            await asyncio.sleep(_STOPPED_S)
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGCONT)
        begin = time.monotonic()
        if not await until(self._is_served, _SERVING_WITHIN_S, 0.2):
            self.result.problem(what, f"no service within {_SERVING_WITHIN_S:.0f} s")
        self._gateway_is_struck = False
        self.result.recoveries.setdefault(what, []).append(time.monotonic() - begin)

    async def _is_served(self) -> bool:
        body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 1}).encode()
        outcome, _ = await self._send("/v1/completions", body, streamed=False)
        return outcome == "200"

    async def idle(self) -> list[str]:
        """Wait until nothing runs, waits or holds a block; return what does all the same."""
        state: dict[str, float] = {}

        async def is_idle() -> bool:
            with contextlib.suppress(aiohttp.ClientError, OSError):
                async with self._session.get(
                    f"http://{self._running.openai_url}/metrics"
                ) as response:
                    page = await response.text()
                for name in GAUGES:
                    values = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
                    state[name] = sum(map(float, values)) if values else float("nan")
            return bool(state) and not any(state.values())

        if await until(is_idle, 20.0, 0.2):
            return []
        return [f"{name} is {value:g} while idle" for name, value in state.items() if value]


def is_an_end(outcome: str, *, gateway_was_struck: bool) -> bool:
    """Return whether a request may end so; only the gateway's own death may close a connection."""
    if outcome in ("cut off", "connection closed"):
        return gateway_was_struck
    return outcome in ("complete", "error event") or (outcome.isdigit() and outcome != "500")


def members(running: Running) -> dict[str, psutil.Process]:
    """Return the processes alive now by role: the launcher, the gateway, and tritonserver's."""
    found = {"launcher": running.top}
    for process in running.top.children():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "client.cli" in words and "gateway" in words and process.name() != "tritonserver":
                found["gateway"] = process
    with contextlib.suppress(psutil.Error, ValueError):  # tritonserver is not there
        found |= running.tree.members()
    return found


class Growth:
    """Memory and descriptors of each process, from when it was first seen."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._begin = time.monotonic()
        self._series: dict[tuple[str, psutil.Process], list[tuple[float, int, int]]] = {}

    def take(self) -> None:
        """Measure each process once."""
        for role, process in members(self._running).items():
            with contextlib.suppress(psutil.Error):
                measured = (process.memory_full_info().uss, process.num_fds())
                seconds = time.monotonic() - self._begin
                self._series.setdefault((role, process), []).append((seconds, *measured))

    def trends(self) -> Iterator[tuple[str, str, Trend]]:
        """Yield role, measure and trend of each process that lived for half of the time."""
        end = time.monotonic() - self._begin
        for (role, process), series in self._series.items():
            later = [each for each in series if each[0] >= end / 2]
            if len(later) < 10 or series[0][0] > end / 4 or not is_alive(process):
                continue
            seconds = [each[0] for each in later]
            for column, measure in ((1, "uss"), (2, "descriptors")):
                values = [float(each[column]) for each in later]
                allowed = allowed_growth(measure, values[0])
                if measure == "uss":
                    allowed = max(allowed, _ARENAS_BYTES)
                yield role, measure, Trend.of(seconds, values, allowed)


async def storm(running: Running, *, seconds: float, seed: int = 0) -> Result:
    """Let the storm rage for the given time, then check what is left of it."""
    growth = Growth(running)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_REQUEST_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers
    ) as session:
        raging = Storm(running, session, seed)
        async with raging.raging(_WORKERS):
            await _strike_in_turn(raging, growth, seconds)
        raging.result.problems += await raging.idle()
    raging.result.trends = list(growth.trends())
    raging.result.problems += [
        f"{role}: {measure} grows by {trend.growth:,.0f}"
        for role, measure, trend in raging.result.trends
        if not trend.is_flat
    ]
    return raging.result


async def _strike_in_turn(raging: Storm, growth: Growth, seconds: float) -> None:
    end = time.monotonic() + seconds
    for role, number in chain(FIRST, cycle(STRIKES)):
        for _ in range(_MEASUREMENTS):
            await asyncio.sleep(_CALM_S / _MEASUREMENTS)
            # Between requests: what a body takes while it is read would hide what is never freed.
            await raging.gate.close()
            await asyncio.to_thread(growth.take)
            raging.gate.open()
        if time.monotonic() >= end:
            return
        await raging.strike(role, number)
        total = raging.result.outcomes.total()
        print(
            f"{role}: {number.name}; {total} requests; {end - time.monotonic():.0f} s to go",
            flush=True,
        )


async def kill_launcher(running: Running) -> list[str]:
    """Kill the launcher, as the system does without memory; return what is left."""
    footprint = running.footprint()
    running.top.kill()

    async def all_gone() -> bool:
        return not await asyncio.to_thread(footprint.remains)

    await until(all_gone, _GONE_WITHIN_S, 0.2)
    return [f"left behind the launcher: {each}" for each in footprint.remains()]


def main() -> int:
    """Run as a command; return its exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="keep the server's log in this file")
    arguments = parser.parse_args()
    with (
        checkpoint() as model,
        launched(model, "--served-model-name", MODEL, has_gateway=True) as running,
    ):
        run = storm(running, seconds=60 * arguments.minutes, seed=arguments.seed)
        result = asyncio.run(run)
        result.problems += asyncio.run(kill_launcher(running))
        if arguments.log:
            arguments.log.write_bytes(running.log.read_bytes())
    result.show()
    return report.verdict(result.problems)


if __name__ == "__main__":
    sys.exit(main())
