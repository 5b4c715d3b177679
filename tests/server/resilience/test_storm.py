"""Requests of every kind while processes are killed: a short version of `storm`."""

from __future__ import annotations

import asyncio

import pytest

from tests.server.resilience.hostile_bodies import MODEL
from tests.server.resilience.launched import launched
from tests.server.resilience.service import checkpoint
from tests.server.resilience.storm import Stream, is_an_end, kill_launcher, storm


@pytest.mark.server
@pytest.mark.large
def test_each_request_has_one_end_while_processes_are_struck() -> None:
    """The gateway is stopped and killed; other tests do that to the processes behind it."""
    flags = ("--served-model-name", MODEL)
    with checkpoint() as model, launched(model, *flags, has_gateway=True) as running:
        result = asyncio.run(storm(running, seconds=50))
        result.problems += asyncio.run(kill_launcher(running))
    result.show()
    assert result.problems == []
    assert result.recoveries.keys() >= {"gateway: SIGSTOP", "gateway: SIGKILL"}
    assert result.outcomes.total() > 100


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        (b'data: {"choices": []}\n\ndata: [DONE]\n\n', "complete"),
        (b'data: {"error": {"message": "a"}}\n\ndata: [DONE]\n\n', "error event"),
        (b'data: {"type": "error", "error": {"message": "a"}}\n\n', "error event"),
        (b'data: {"type": "message_stop"}\n\n', "complete"),
        (b'data: {"choices": []}\n\n', "cut off"),
        (b"data: [DONE]\n\ndata: [DONE]\n\n", "ended more than once"),
        (b'data: {"type": "message_stop"}\n\ndata: {"type": "message_stop"}\n\n', "ended more"),
    ],
)
def test_stream_outcome_is_that_of_its_last_events(events: bytes, outcome: str) -> None:
    stream = Stream()
    for at in range(len(events)):
        stream.feed(events[at : at + 1])
    assert stream.outcome.startswith(outcome)


def test_a_connection_breaks_with_its_gateway_alone() -> None:
    assert not is_an_end("cut off", gateway_was_struck=False)
    assert is_an_end("cut off", gateway_was_struck=True)
    assert not is_an_end("ended more than once", gateway_was_struck=True)
    assert not is_an_end("500", gateway_was_struck=True)
