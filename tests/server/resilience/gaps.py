"""What hostile requests take from others, beside plain requests of the same size.

    python -m tests.server.resilience.gaps

8 good streams run through the gateway of `trident serve`. Of each hostile body a row is printed:
the longest pause of the streams and the growth of the gateway's memory, each beside a plain request
and beside the hostile one. A pause may have twice the plain one's length and 0.3 s, and the memory
100 MiB more. Beside ambiguous and complex grammars streams are cancelled, and small new schemas of
another tenant are followed: neither may take 5 s. At the end 900 requests wait, of one tenant
and of 900: the tokens per second.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from client.aio import AsyncTridentClient
from client.gateway.security.body_limits import MAX_BUFFERED_BYTES
from engine.demo import CHECKPOINT_DIR
from tests.server.resilience import report
from tests.server.resilience.hostile_bodies import GRAMMARS, HOSTILE, MODEL, WIDE, HostileBody
from tests.server.resilience.launched import launched
from tests.server.resilience.storm import members

MIB = 2**20
MAX_GROWTH = 100 * MIB
_ROUNDS = 3  # another program may have had the processors
_NUM_UNFINISHED, _UNFINISHED_BYTES = 60, 9 * MIB
_NUM_TENANTS, _TENANT_TOKENS, _TENANT_KEY = 900, 16, "a-key-of-the-drill"
_LEAST_SHARE = 0.8
MAX_WAIT_S = 5.0  # 0.3 s usually, and once 2 s on a machine with four times its load


@dataclass(frozen=True)
class Cost:
    """What an action took: the longest pause of the streams, and bytes of the gateway's memory."""

    pause_s: float
    growth: int


class Gateway:
    """The process of a gateway, and streams through it that never end."""

    def __init__(self, port: int, pid: int, num_streams: int) -> None:
        self.port = port
        self._proc = Path(f"/proc/{pid}")
        self._pauses = [0.0] * num_streams
        self._last = [0.0] * num_streams
        self._is_ending = False
        self._threads = [
            threading.Thread(target=self._stream, args=(number,)) for number in range(num_streams)
        ]

    @contextmanager
    def streaming(self) -> Iterator[None]:
        """Keep the streams running in the block."""
        self._last = [time.monotonic()] * len(self._last)
        for each in self._threads:
            each.start()
        try:
            yield
        finally:
            self._is_ending = True
            for each in self._threads:
                each.join(60)

    def ask(self, path: str, body: Any) -> tuple[int, bytes]:
        """Return status and answer."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=180)) as connection:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, content, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def ask_together(self, path: str, bodies: Sequence[bytes]) -> list[int]:
        """Return the statuses of requests that are sent at once."""
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(lambda body: self.ask(path, body)[0], bodies))

    def flood(self, hostile: HostileBody) -> list[int]:
        """Send the requests of a hostile body at once; return their statuses."""
        bodies = [hostile.body() for _ in range(hostile.num_requests)]
        return self.ask_together(hostile.path, bodies)

    @contextmanager
    def unfinished(self, count: int, size: int) -> Iterator[int]:
        """Send bodies but for the last byte of each; yield how many were refused, and close."""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {size}\r\n\r\n"
        refused = 0
        with ExitStack() as peers:
            for _ in range(count):
                peer = peers.enter_context(socket.create_connection(("127.0.0.1", self.port)))
                peer.sendall(head.encode() + b"x" * (size - 1))
                peer.settimeout(0.05)
                with suppress(TimeoutError):  # else it is waited for
                    refused += peer.recv(100).startswith(b"HTTP/1.1 503 ")
            yield refused

    def cost(self, action: Callable[[], object]) -> Cost:
        """Return what `action` takes of the streams and of the memory."""
        (self._proc / "clear_refs").write_text("5")  # the peak begins anew
        before = self._memory("VmRSS")
        self._pauses = [0.0] * len(self._pauses)
        action()
        time.sleep(0.2)
        now = time.monotonic()
        pauses = [*self._pauses, *(now - last for last in self._last)]
        return Cost(max(pauses), self._memory("VmHWM") - before)

    def _memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", (self._proc / "status").read_text())
        assert found
        return int(found[1]) * 1024

    def _stream(self, number: int) -> None:
        body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
        while not self._is_ending:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as peer:
                headers = {"content-type": "application/json"}
                peer.request("POST", "/v1/completions", json.dumps(body), headers)
                answer = peer.getresponse()
                assert answer.status == 200
                while (line := answer.readline()) and not self._is_ending:
                    assert b'"error"' not in line, line  # a stream that ends pauses for ever
                    now = time.monotonic()
                    self._pauses[number] = max(self._pauses[number], now - self._last[number])
                    self._last[number] = now


def compare(
    gateway: Gateway,
    hostile: Callable[[], object],
    plain: Callable[[], object],
    max_growth: int = MAX_GROWTH,
) -> tuple[Cost, Cost, str]:
    """Return the costs of the plain and the hostile action, and what is wrong with these, or ""."""
    plain()  # what grows once is no other's
    for _ in range(_ROUNDS):
        control, cost = gateway.cost(plain), gateway.cost(hostile)
        if cost.growth > control.growth + max_growth:
            return control, cost, f"grows by {cost.growth // MIB} MiB"
        if cost.pause_s <= 2 * control.pause_s + 0.3:
            return control, cost, ""
    return control, cost, f"a pause of {cost.pause_s:.2f} s beside {control.pause_s:.2f} s"


class Drill:
    """The rows of the table, and the problems of those that are not as they should be."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.rows: list[tuple[object, ...]] = []
        self.problems: list[str] = []

    def send(self, hostile: HostileBody) -> None:
        """Add the row of a hostile body."""
        count, answers = hostile.num_requests, Counter[int]()
        bodies = [[hostile.body() for _ in range(count)] for _ in range(_ROUNDS)]
        plain = [hostile.plain_body(len(bodies[0][0]))] * count
        ask = partial(self._gateway.ask_together, hostile.path)

        self._add(
            hostile.name,
            answers,
            compare(self._gateway, lambda: answers.update(ask(bodies.pop())), lambda: ask(plain)),
        )

    def send_unfinished(self) -> None:
        """Add the row of bodies whose last byte never comes."""
        answers = Counter[int]()
        plain = json.dumps({"prompt": "x" * _UNFINISHED_BYTES}).encode()

        def ask() -> None:
            for _ in range(_NUM_UNFINISHED):
                self._gateway.ask("/v1/completions", plain)

        def hostile() -> None:
            with self._gateway.unfinished(_NUM_UNFINISHED, _UNFINISHED_BYTES) as refused:
                answers[503] += refused

        max_growth = MAX_BUFFERED_BYTES + MAX_GROWTH
        found = compare(self._gateway, hostile, ask, max_growth)
        self._add(f"{_NUM_UNFINISHED} unfinished bodies", answers, found)

    def _add(self, name: str, answers: Counter[int], found: tuple[Cost, Cost, str]) -> None:
        *costs, problem = found
        problem = problem or ("an internal error" if answers[500] else "")
        pauses = (f"{1e3 * each.pause_s:,.0f}" for each in costs)
        growths = (f"{each.growth / MIB:,.1f}" for each in costs)
        statuses = ", ".join(f"{status} ({count})" for status, count in answers.items() if count)
        self.rows.append((name, *pauses, *growths, statuses))
        self.problems += [f"{name}: {problem}"] if problem else []


async def cancel_seconds(client: AsyncTridentClient, number: int) -> float:
    """Return the time from a request to cancel a stream until its end."""
    name = f"cancelled {number}"
    stream = client.stream("Once", max_tokens=400, ignore_eos=True, request_id=name)
    await anext(stream)
    began = time.monotonic()
    await client.cancel(name)
    async for _ in stream:
        pass
    return time.monotonic() - began


async def schema_seconds(client: AsyncTridentClient, number: int) -> float:
    """Return the time that a stranger waits for a token of a small schema, each time a new one."""
    schema = {"const": f"schema {time.time_ns()}"}
    who = {"tenant": "a stranger", "tenant_key": _TENANT_KEY}
    began = time.monotonic()
    await client.generate("Once", max_tokens=1, structured_outputs={"json": schema}, **who)
    return time.monotonic() - began


Wait = Callable[[AsyncTridentClient, int], Awaitable[float]]


async def longest_wait(url: str, model: str, wait: Wait, flood: Callable[[], object]) -> float:
    """Wait again and again until `flood` is over, and three times at least; return the longest."""
    times: list[float] = []
    async with AsyncTridentClient(url, model=model) as client:
        sending = asyncio.create_task(asyncio.to_thread(flood))
        while len(times) < _ROUNDS or not sending.done():
            times.append(await wait(client, len(times)))
        await sending
    return max(times)


def waits(url: str, gateway: Gateway) -> list[str]:
    """Print what others wait for beside floods of grammars; return what is wrong."""
    rows: list[tuple[object, ...]] = []
    problems: list[str] = []
    for what, wait in (("the end of a stream", cancel_seconds), ("a schema", schema_seconds)):
        times = []
        for flood in GRAMMARS:
            send = partial(gateway.flood, flood)
            times.append(asyncio.run(longest_wait(url, MODEL, wait, send)))
            if times[-1] > MAX_WAIT_S:
                problems.append(f"{flood.name}: {times[-1]:.1f} s until {what}")
        rows.append((what, *(f"{1e3 * each:,.0f}" for each in times)))
    names = (each.name for each in GRAMMARS)
    report.show("Longest time in ms that others wait", ("beside", *names), rows)
    return problems


async def tokens_per_second(url: str, num_tenants: int) -> float:
    """Return the rate at which 900 requests that wait are answered."""
    limit, key = _TENANT_TOKENS, _TENANT_KEY
    names = [f"tenant {number % num_tenants}" for number in range(_NUM_TENANTS)]
    async with AsyncTridentClient(url, model=MODEL) as client:
        began = time.monotonic()
        asked = (
            client.generate("Once", max_tokens=limit, ignore_eos=True, tenant=name, tenant_key=key)
            for name in names
        )
        answers = await asyncio.gather(*asked)
        seconds = time.monotonic() - began
    return sum(each.outputs[0].num_output_tokens for each in answers) / seconds


def tenants(url: str) -> list[str]:
    """Print the tokens per second of one and of many tenants; return what is wrong."""
    for _ in range(_ROUNDS):
        one, many = (asyncio.run(tokens_per_second(url, n)) for n in (1, _NUM_TENANTS))
        if many >= _LEAST_SHARE * one:
            break
    columns = ("tenants", "tokens/s")
    report.show("900 waiting requests", columns, [("1", one), (f"{_NUM_TENANTS}", many)])
    return [] if many >= _LEAST_SHARE * one else [f"{many:.0f} tokens/s of many tenants"]


def main() -> int:
    """Run as a command; return its exit status."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    flags = ("--served-model-name", MODEL, "--tenant-key", _TENANT_KEY)
    with launched(CHECKPOINT_DIR, *flags, has_gateway=True) as running:
        port = int(running.openai_url.rpartition(":")[2])
        gateway = Gateway(port, members(running)["gateway"].pid, num_streams=8)
        drill = Drill(gateway)
        with gateway.streaming():
            for hostile in (*HOSTILE, *GRAMMARS, *WIDE):
                drill.send(hostile)
            drill.send_unfinished()
            problems = [*drill.problems, *waits(running.grpc_url, gateway)]
        problems += tenants(running.grpc_url)
    columns = ("input", "plain, ms", "hostile, ms", "plain, MiB", "hostile, MiB", "answers")
    report.show("Longest pause of 8 streams, growth of the gateway", columns, drill.rows)
    return report.verdict(problems)


if __name__ == "__main__":
    sys.exit(main())
