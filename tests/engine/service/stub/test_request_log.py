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
from engine.protocol import Chunk, RequestStats
from engine.service.stub.delivery import NewRequest
from engine.service.stub.request_log import RequestLog

SECRET = 31337
REQUEST = NewRequest([SECRET] * 5, {}, num_sequences=2, request_id="mine", arrival_time=100.0)


class Sink:
    def __init__(self) -> None:
        self.got: list[object] = []

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        self.got.append((chunks, last))

    def fail(self, error: TridentError) -> None:
        self.got.append(error)


def chunk(index: int, num_tokens: int, reason: str | None = None, start: float = 0) -> Chunk:
    stats = RequestStats(5, 4, num_tokens, 0, 100.0, 101.0 + start, 102.0 + start, 105.0 + start)
    return Chunk(index, [SECRET], [SECRET] * num_tokens, reason, stats=stats if reason else None)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    said = []
    for record in caplog.records:
        assert (record.name, record.levelno) == ("trident.request", logging.INFO)
        fields = {k: v for k, v in vars(record)["fields"].items() if v is not None}
        assert str(SECRET) not in repr(fields)
        said.append((record.getMessage(), fields))
    return said


@pytest.fixture
def refused() -> list[Exception]:
    return []


@pytest.fixture
def request_log(refused: list[Exception], caplog: pytest.LogCaptureFixture) -> RequestLog:
    caplog.set_level(logging.INFO)
    return RequestLog(refused.append)


def test_one_line_when_all_sequences_have_finished(
    request_log: RequestLog, refused: list[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    sink = Sink()
    logged = request_log.logged(7, REQUEST, sink)
    sent = [[chunk(0, 1), chunk(1, 2, "stop", start=1)], [chunk(0, 3, "length")]]
    logged.send(sent[0], last=False)
    assert not caplog.records
    logged.send(sent[1], last=True)
    assert sink.got == [(sent[0], False), (sent[1], True)]
    assert not refused
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
    ("error", "event", "reason", "is_refusal"),
    [
        (RequestCancelledError("was cancelled"), "request cancelled", "abort", False),
        (EngineDeadError("has died"), "request lost", "error", False),
        (QueueFullError("Maximum queue size"), "request refused", None, True),
    ],
)
def test_one_line_for_each_other_end(
    request_log: RequestLog,
    refused: list[Exception],
    caplog: pytest.LogCaptureFixture,
    error: TridentError,
    event: str,
    reason: str | None,
    is_refusal: bool,
) -> None:
    sink = Sink()
    logged = request_log.logged(7, REQUEST, sink)
    logged.send([chunk(0, 2)], last=False)
    logged.fail(error)
    assert sink.got[-1] is error
    assert refused == ([error] if is_refusal else [])
    ((said, fields),) = lines(caplog)
    assert (said, fields.get("finish_reason"), fields["output_tokens"]) == (event, reason, 2)
    assert fields["request_id"] == "mine"
    assert fields.get("error") == (None if reason == "abort" else str(error))
    assert fields["e2e_s"] > 0


def test_a_refused_id_does_not_fill_the_log(
    request_log: RequestLog, caplog: pytest.LogCaptureFixture
) -> None:
    request_log.refused("x" * 10**6, RequestError("request id: is too long"))
    ((_, fields),) = lines(caplog)
    assert len(fields["request_id"]) < 10_000


def test_an_internal_error_keeps_its_words_to_itself(
    request_log: RequestLog, refused: list[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    request_log.refused("mine", KeyError("inner thing"))
    assert lines(caplog) == [("request refused", {"request_id": "mine", "error": "internal error"})]
    assert len(refused) == 1
