"""`trident serve` under load: what comes back by itself, and how streams end; a short `restart`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.server.resilience.kill_server import GONE_WITHIN_S
from tests.server.resilience.launched import Running, launched
from tests.server.resilience.restart import (
    KILLED_ENDED_WITHIN_S,
    SETTINGS,
    STRIKES,
    begun_streams,
    is_served,
    restart,
    wrong_ends,
)
from tests.server.resilience.service import checkpoint
from tests.server.resilience.storm import members
from tests.waiting import eventually

pytestmark = pytest.mark.server

_SHORT = ("kill -9 of the tokenizer", "SIGSTOP of the detokenizer", "two wrong requests")
_LONG = 3000  # tokens: a minute


@pytest.fixture(scope="module")
def model() -> Iterator[Path]:
    with checkpoint() as folder:
        yield folder


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Running]:
    with launched(model, *SETTINGS, has_gateway=True) as running:
        yield running


@pytest.fixture
def another(model: Path) -> Iterator[Running]:
    with launched(model, *SETTINGS, "--exit-timeout-secs=2", has_gateway=True) as running:
        yield running


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _SHORT else pytest.mark.large, id=name)
        for name in STRIKES
    ],
)
def test_a_server_that_dies_comes_back_and_its_streams_end_with_an_error(
    running: Running, name: str
) -> None:
    assert restart(running, name).problems == []


def test_streams_end_at_once_when_the_gateway_is_killed_and_it_comes_back(
    running: Running,
) -> None:
    streams = begun_streams(running, _LONG)
    server = running.tree.head
    members(running)["gateway"].kill()
    began = time.monotonic()
    for each in streams:
        each.join(60)
    assert time.monotonic() - began < KILLED_ENDED_WITHIN_S
    assert {each.outcome for each in streams} == {"cut off"}  # nobody else has their connections
    assert eventually(lambda: is_served(running))
    assert running.tree.head == server


@pytest.mark.large
def test_nothing_piles_up_over_restarts(running: Running) -> None:
    figures = set()
    for _ in range(3):
        running.tree.head.kill()
        assert eventually(lambda: not running.is_ready())
        assert eventually(running.is_ready, 120)
        family = running.top.children(recursive=True)
        figures.add((running.top.num_fds(), len(family), len(running.footprint().regions)))
    assert len(figures) == 1


def test_streams_end_with_an_error_event_when_the_server_is_stopped(another: Running) -> None:
    streams = begun_streams(another, _LONG)
    footprint = another.footprint()
    another.top.terminate()
    assert wrong_ends(streams, time.monotonic() + 20) == []
    assert {each.outcome for each in streams} == {"error"}
    assert eventually(lambda: not footprint.remains(), GONE_WITHIN_S)


def test_everything_ends_when_the_launcher_is_killed_under_streams(another: Running) -> None:
    streams = begun_streams(another, _LONG)
    footprint = another.footprint()
    another.top.kill()
    assert wrong_ends(streams, time.monotonic() + 20) == []
    assert {each.outcome for each in streams} == {"error"}
    assert eventually(lambda: not footprint.remains(), GONE_WITHIN_S), footprint.remains()


def test_everything_ends_when_the_launcher_is_killed_and_all_others_hang(
    another: Running,
) -> None:
    footprint = another.footprint()
    watchers = {each for each in footprint.processes if "child.py" in " ".join(each.cmdline())}
    assert len(watchers) == 2  # of tritonserver and of the gateway
    for each in footprint.processes - watchers - {another.top}:
        each.suspend()
    another.top.kill()
    # The memory of stages that cannot remove it goes with the next start.
    left = replace(footprint, regions=frozenset())
    assert eventually(lambda: not left.remains(), GONE_WITHIN_S), left.remains()
