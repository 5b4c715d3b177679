"""A server's gauges and log."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from engine.launch import server_log
from engine.launch.server import TritonServer

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


def metrics(server: TritonServer) -> str:
    """Return the /metrics page."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        text: str = response.read().decode()
    return text


def gauges(server: TritonServer) -> dict[str, float]:
    """Return running and waiting requests and the share of KV blocks in use, as in /metrics."""
    page = metrics(server)
    return {name: _value(page, name) for name in GAUGES}


def _value(page: str, name: str) -> float:
    values = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
    assert len(values) == 1, f"{name} is in /metrics {len(values)} times"
    return float(values[0])


async def until(
    condition: Callable[[], Awaitable[bool]], seconds: float, interval: float = 0.02
) -> bool:
    """Wait for `condition`; return whether it became true in time."""
    deadline = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(interval)
    return True


def health(server: TritonServer) -> dict[str, Any] | None:
    """Return the engine's answer to a health request; None if that is an error."""
    url = f"http://{server.http_url}/v2/models/engine/generate"
    request = urllib.request.Request(url, b'{"health": true}')
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            answer: dict[str, Any] = json.loads(json.load(response)["health"])
            return answer
    except OSError:  # URLError and HTTPError too
        return None


async def not_idle(server: TritonServer, seconds: float = 10.0) -> list[str]:
    """Wait until the server is idle; return what runs, waits or holds blocks after `seconds`."""
    state: dict[str, float] = {}

    async def idle() -> bool:
        answer = await asyncio.to_thread(health, server)
        state["num_in_flight"] = answer["num_in_flight"] if answer else math.nan
        state.update(await asyncio.to_thread(gauges, server))
        return not any(state.values())

    if await until(idle, seconds, 0.1):
        return []
    return [f"{name} is {value:g} while idle" for name, value in state.items() if value]


# What the engine says on a machine where nothing could be compiled.
_NO_COMPILER = "No CPU kernels for this machine"


def complaints(log: str, allowed: Sequence[str] = ()) -> list[str]:
    """Return the lines of a server's log above INFO, and those of tracebacks.

    Args:
        allowed: regular expressions; matching lines are left out.
    """
    found = []
    for line in log.splitlines():
        parsed = server_log.parse(line)
        raw = not parsed.severity and ("Traceback" in line or "Exit timeout expired" in line)
        expected = (_NO_COMPILER, *allowed)
        if (parsed.is_problem or raw) and not any(re.search(each, line) for each in expected):
            found.append(line)
    return found
