"""Load leaves nothing behind: a short version of `soak`, and tests of how it judges."""

import asyncio
import csv
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.launch.model_configs import UNARY
from engine.launch.server import TritonServer
from tests.server.caller import Caller
from tests.server.resilience.gate import Gate
from tests.server.resilience.observe import until
from tests.server.resilience.processes import STAGES, Tree
from tests.server.resilience.soak import soak
from tests.server.resilience.trend import MIB, Trend, allowed_growth

# Both are too short to judge memory, which is still warming up.
each_duration = pytest.mark.parametrize(
    "seconds", [3.0, pytest.param(30.0, marks=pytest.mark.large)]
)


def descriptors(server: TritonServer) -> int:
    return sum(process.num_fds() for process in Tree.of(server.pid).members().values())


@pytest.mark.server
@each_duration
def test_load_of_every_kind_is_answered_and_leaves_no_descriptor_or_thread(
    resilient: TritonServer, seconds: float, tmp_path: Path
) -> None:
    async def back_to_normal() -> bool:
        return descriptors(resilient) <= before

    file = tmp_path / "soak.csv"
    with closing(Caller(resilient.grpc_url, resilient.http_url, UNARY)) as caller:
        caller.one(text_input="a", max_tokens=1)  # that model connects for its first request
    before = descriptors(resilient)
    run = soak(
        resilient,
        seconds=seconds,
        workers=24,
        between_samples_s=0.5,
        between_pauses_s=1,
        csv=file,
    )
    result = asyncio.run(run)
    assert result.problems == []
    assert result.outcomes["request: complete"] > 20
    assert sum(result.outcomes.values()) > result.outcomes["request: complete"]
    assert not [leak for leak in result.leaks if "threads" in leak]
    assert asyncio.run(until(back_to_normal, 10))
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    processes = {"tritonserver", *STAGES, "engine process"}
    assert {row["process"] for row in rows} == processes
    assert all(int(row["rss"]) >= int(row["pss"]) >= int(row["uss"]) > MIB for row in rows)


@given(
    st.floats(-1e6, 1e6), st.floats(0, 1e9), st.lists(st.integers(0, 10), min_size=3, max_size=60)
)
def test_the_slope_of_a_line_is_found(slope: float, start: float, steps: list[int]) -> None:
    seconds = [sum(steps[:i]) + i for i in range(len(steps))]
    trend = Trend.of(seconds, [start + slope * s for s in seconds], 0)
    assert trend.growth == pytest.approx(slope * seconds[-1], rel=1e-3, abs=1e-3 + 1e-9 * start)
    assert trend.per_hour == pytest.approx(trend.growth / seconds[-1] * 3600, rel=1e-3, abs=1e-3)


def leaky(per_hour: float) -> Trend:
    """Return the trend over 15 minutes of a process of 300 MiB with fluctuations."""
    seconds = list(range(0, 900, 5))
    values = [300 * MIB + per_hour * s / 3600 + MIB * (s % 7) for s in seconds]
    return Trend.of(seconds, values, allowed_growth("rss", values[0]))


def test_a_leak_is_told_from_ups_and_downs() -> None:
    assert leaky(0).is_flat
    assert leaky(5 * MIB).is_flat
    assert not leaky(40 * MIB).is_flat


def test_what_depends_on_other_programs_is_not_judged() -> None:
    assert Trend.of(range(10), [i * MIB * 100 for i in range(10)], allowed_growth("pss", 0)).is_flat


def test_three_descriptors_more_are_a_leak() -> None:
    values = [50, 50, 51, 51, 52, 52, 53, 53, 54, 54]
    assert not Trend.of(range(10), values, allowed_growth("descriptors", 50)).is_flat


def test_a_closed_gate_waits_for_those_inside_and_lets_nobody_in() -> None:
    async def scenario() -> list[str]:
        gate = Gate()
        events: list[str] = []

        async def work() -> None:
            while not gate.ended:
                async with gate.round():
                    events.append("in")
                    await asyncio.sleep(0.01)
                    events.append("out")

        worker = asyncio.create_task(work())
        await asyncio.sleep(0.03)
        await gate.close()
        events.append("closed")
        await asyncio.sleep(0.05)
        events.append("opened")
        gate.open()
        await asyncio.sleep(0.03)
        gate.end()
        await worker
        return events

    events = asyncio.run(scenario())
    closed = events.index("closed")
    assert events[closed - 1] == "out"
    assert events[closed + 1] == "opened"
    assert events[closed + 2] == "in"
    assert events.count("in") == events.count("out")
