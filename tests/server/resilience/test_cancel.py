"""Cancellation frees a request's resources and affects no other: short versions of `cancel`."""

import asyncio
import math

import pytest

from engine.launch.server import TritonServer
from tests.server.resilience.cancel import storm
from tests.server.resilience.cancel_latency import STATES, Result, State, gap, measure
from tests.server.resilience.conversation import Answer
from tests.server.resilience.ways import WAYS, Leaving

GIVE_UP_S = 20.0  # how fast it is on a quiet machine, `cancel` measures


@pytest.mark.server
@pytest.mark.parametrize("max_tokens", [24, pytest.param(120, marks=pytest.mark.large)])
def test_a_third_of_64_streams_ends_early_and_the_others_never_notice(
    resilient: TritonServer, max_tokens: int
) -> None:
    assert asyncio.run(storm(resilient, seed=1, max_tokens=max_tokens)) == []


@pytest.mark.server
def test_every_cancellation_that_can_be_noticed_is(resilient: TritonServer) -> None:
    result = asyncio.run(measure(resilient, rounds=1, gaps=False, give_up_s=GIVE_UP_S))
    seconds = result.seconds.items()
    assert [f"{way.name}, {state}" for (way, state), took in seconds if max(took) == math.inf] == []
    assert len(result.seconds) == sum(not gap(way, state) for way in WAYS for state in STATES)


def test_a_slow_cancellation_is_a_problem() -> None:
    running = State(waiting=False, streamed=True)
    assert not Result({(WAYS[0], running): [0.05, 3.0, 0.04]}).problems
    assert Result({(WAYS[0], running): [0.5, 3.0, 0.04]}).problems


def test_who_leaves_a_running_stream_is_always_noticed() -> None:
    leaving = [way for way in WAYS if isinstance(way, Leaving)]
    assert len(leaving) == 6
    assert not any(gap(way, State(waiting=False, streamed=True)) for way in leaving)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (Answer(["a"], "length", "", ended=True), "complete"),
        (Answer(["a"], "", "", ended=True), "cut off"),
        (Answer(["a"], "abort", "", ended=True), "abort"),
        (Answer(["a"], "stop", "lost", ended=True), "error"),
        (Answer(["a"], "stop", "", ended=False), "left"),
    ],
)
def test_a_truncated_answer_does_not_look_complete(answer: Answer, outcome: str) -> None:
    assert answer.outcome == outcome
