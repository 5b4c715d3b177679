"""Malformed and extreme requests harm no others: a short `tests.server.resilience.fuzz`."""

import asyncio

import pytest

from engine.launch.server import TritonServer
from tests.server.resilience.fuzz import NUM_GOOD_STREAMS, fuzz, make
from tests.server.resilience.fuzzing.case import Case
from tests.server.resilience.fuzzing.judge import GOOD, Judge
from tests.server.resilience.fuzzing.wire import Reply

RIGHT = Case("any", "stream", b"request")


@pytest.mark.server
@pytest.mark.parametrize("requests", [300, pytest.param(3000, marks=pytest.mark.large)])
def test_malformed_requests_are_answered_with_errors_beside_good_streams(
    server: TritonServer, requests: int
) -> None:
    result = asyncio.run(fuzz(server, seed=1, requests=requests))
    assert not result.problems
    assert result.good_completed >= NUM_GOOD_STREAMS


def test_a_request_of_a_seed_is_always_the_same() -> None:
    assert [make(3, i) for i in range(200)] == [make(3, i) for i in range(200)]
    assert make(3, 0) != make(4, 0)


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(hung=True), "HUNG"),
        (Reply(refused=True), "GONE"),
        (Reply(), "NO REPLY"),
        (Reply(answered=True), "ACCEPTED"),
        (Reply(error=" "), "NO MESSAGE"),
        (Reply(error="internal error"), "INTERNAL"),
        (Reply(error="x", text='File "a.py", line 3'), "LEAKS"),
        (Reply(error="max_tokens: must be at least 1"), "error"),
    ],
)
def test_wrong_replies_are_told_from_right_ones(reply: Reply, outcome: str) -> None:
    assert Judge([])(RIGHT, reply) == outcome
    assert (outcome in GOOD) == (outcome == "error")


def test_a_valid_request_may_be_refused_by_a_full_queue_alone() -> None:
    valid = Case("any", "stream", b"request", must_fail=False, must_succeed=True)
    assert Judge([])(valid, Reply(error="seed: must be less")) == "REFUSED"
    assert Judge([])(valid, Reply(error="Maximum queue size of 70 requests reached")) == "error"
    assert Judge([])(valid, Reply(answered=True)) == "valid"
