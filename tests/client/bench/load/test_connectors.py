"""The ways to a server read all that it says, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from client.bench.load.plan import Plan, Session
from client.bench.load.prompts import Turn
from client.bench.load.record import Record, Target
from client.bench.load.worker import ask_all
from client.gateway.settings import GatewaySettings
from tests.client.fake_triton import FakeTriton, Piece
from tests.server.gateway.running import running

LONG = 100_000  # tokens: more than a frame, a window and a read
PIECES = [
    Piece({0: "a b"}),
    Piece({0: "c"}, delay_s=0.2),
    Piece({0: "d " * LONG}, finished=(0,), final=True),
]


@pytest.fixture(params=["grpc", "completions", "chat"])
def target(request: pytest.FixtureRequest, triton: FakeTriton) -> Iterator[Target]:
    triton.pieces = PIECES
    if request.param == "grpc":
        yield Target("grpc", triton.url, "ensemble")
        return
    with running(GatewaySettings((triton.url,))) as address:
        yield Target(request.param, f"http://{address}/v1", "ensemble", takes_ids=False)


def ask(target: Target, *texts: str, asked: int = 3 + LONG) -> list[Record]:
    plan = Plan([Session(n, [Turn(t, [], asked)], 0.0) for n, t in enumerate(texts)])
    return asyncio.run(ask_all(target, plan)).records


def test_all_is_read_with_its_time(target: Target, triton: FakeTriton) -> None:
    questions = [f"question {number} " + "x" * 80_000 for number in range(8)]
    records = ask(target, *questions)
    assert [each.error for each in records] == [""] * 8
    for each in records:
        assert each.num_tokens == 3 + LONG
        assert each.gaps[0] > 0.1
        assert each.prompt_tokens == 7  # as the fake server counts every prompt
    assert len(triton.requests) == 8
    assert triton.requests[0]["sampling_parameters"]["ignore_eos"] is True


def test_a_failure_is_told_in_the_servers_words(target: Target, triton: FakeTriton) -> None:
    triton.pieces, triton.error_message = [Piece({0: "a"})], "no such luck"
    (record,) = ask(target, "a")
    assert "no such luck" in record.error


def test_a_wrong_number_of_tokens_is_an_error(target: Target, triton: FakeTriton) -> None:
    (record,) = ask(target, "a", asked=5)
    assert record.error == f"answered with {3 + LONG} tokens where 5 were asked"


def test_a_server_that_goes_is_an_error() -> None:
    (record,) = ask(Target("grpc", "127.0.0.1:9", "ensemble"), "a")
    assert "refused" in record.error
