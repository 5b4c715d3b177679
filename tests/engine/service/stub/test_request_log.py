import logging
from typing import Any

import pytest

from engine.errors import (
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    TridentError,
)
from engine.protocol.messages import RequestStats
from engine.service.stub.request_log import log_end, log_refusal
from engine.service.stub.stream import NewRequest, RequestStream
from tests.engine.service.stub.test_stream import Recorder, out

SECRET = 31337
REQUEST = NewRequest([SECRET] * 5, {}, num_sequences=2, request_id="mine", arrival_time=100.0)


def output(index: int, num_tokens: int, reason: str | None = None, start: float = 0) -> Any:
    stats = RequestStats(5, 4, num_tokens, 0, 100.0, 101.0 + start, 102.0 + start, 105.0 + start)
    ids = [SECRET] * num_tokens
    return out(index, *ids, window=[SECRET], finish=reason, stats=stats if reason else None)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    said = []
    for record in caplog.records:
        assert (record.name, record.levelno) == ("trident.request", logging.INFO)
        fields = {k: v for k, v in vars(record)["fields"].items() if v is not None}
        assert str(SECRET) not in repr(fields)
        said.append((record.getMessage(), fields))
    return said


@pytest.fixture
def stream(caplog: pytest.LogCaptureFixture) -> RequestStream:
    caplog.set_level(logging.INFO)
    return RequestStream(7, REQUEST, Recorder())


def test_a_request_that_has_finished(
    stream: RequestStream, caplog: pytest.LogCaptureFixture
) -> None:
    for each in (output(0, 1), output(1, 2, "stop", start=1), output(0, 3, "length")):
        stream.append(each)
    stream.deliver()
    log_end(stream)
    assert not stream.is_refused
    assert lines(caplog) == [
        (
            "request finished",
            {
                "request_id": "mine",
                "uid": 7,
                "finish_reason": "length,stop",
                "prompt_tokens": 5,
                "output_tokens": 6,
                "cached_tokens": 4,
                "queue_s": 1.0,
                "ttft_s": 2.0,
                "e2e_s": 6.0,
            },
        )
    ]


@pytest.mark.parametrize(
    ("error", "event", "reason", "is_refused"),
    [
        (RequestCancelledError("was cancelled"), "request cancelled", "abort", False),
        (EngineDeadError("has died"), "request lost", "error", False),
        (QueueFullError("Maximum queue size"), "request refused", None, True),
    ],
)
def test_each_other_end(
    stream: RequestStream,
    caplog: pytest.LogCaptureFixture,
    error: TridentError,
    event: str,
    reason: str | None,
    is_refused: bool,
) -> None:
    stream.append(output(0, 2))
    stream.fail(error)
    stream.deliver()
    log_end(stream)
    assert stream.is_refused == is_refused
    ((said, fields),) = lines(caplog)
    assert (said, fields.get("finish_reason"), fields["output_tokens"]) == (event, reason, 2)
    assert fields["request_id"] == "mine"
    assert fields.get("error") == (None if reason == "abort" else str(error))
    assert fields["e2e_s"] > 0


def test_a_refused_id_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_refusal("x" * 10**6, RequestError("request id: is too long"))
    ((_, fields),) = lines(caplog)
    assert len(fields["request_id"]) < 10_000


def test_the_text_of_an_internal_error_is_not_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_refusal("mine", KeyError("inner thing"))
    assert lines(caplog) == [("request refused", {"request_id": "mine", "error": "internal error"})]
