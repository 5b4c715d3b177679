"""A model in two processes through the real server: the same text, errors with the rank."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from client import TridentClient
from client.commands.health import check
from engine import LLM, SamplingParams
from engine.launch.server import TritonServer
from kernels.cpu.library import operations
from tests.server.caller import Caller
from tests.server.resilience.ranks import PROMPT, TOKENS, inputs, ranked, strike
from tests.server.scraping import scrape
from tests.waiting import eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(operations(torch.empty(0)) is None, reason="the CPU kernels are not built"),
]


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[TritonServer]:
    with ranked(checkpoint, 2) as server:
        yield server


@pytest.fixture(scope="module")
def caller(server: TritonServer) -> Iterator[Caller]:
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        yield caller


def test_ranks_answer_as_one_process_does(
    server: TritonServer, caller: Caller, checkpoint: Path
) -> None:
    llm = LLM(str(checkpoint), dtype="float32")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    [result] = llm.generate(PROMPT, sampling, use_tqdm=False)
    assert caller.text(**inputs(TOKENS)) == result.outputs[0].text
    assert "rank 1: " in server.log
    with TridentClient(server.grpc_url) as client:
        assert len(client.health().ranks) == 2
        line = check(client, generate=False, timeout=10)
    assert re.search(r", 2 ranks \(on (cpu with \d threads?(, |\))){2}$", line)
    for rank in range(2):
        assert eventually(lambda rank=rank: scrape(server)[f"rank_up {rank}"] == 1)
    name = "rank_sum_wait_seconds_total"

    def is_counted() -> bool:
        caller.text(**inputs(TOKENS))
        return sum(scrape(server)[f"{name} {rank}"] for rank in range(2)) > 0

    assert eventually(is_counted)


@pytest.mark.parametrize(
    ("blow", "text"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "")],
    ids=["killed", "stopped"],
)
def test_rank_that_fails_ends_all_streams_with_its_name(
    server: TritonServer, caller: Caller, blow: signal.Signals, text: str
) -> None:
    expected = caller.text(**inputs(TOKENS))
    errors, *_ = strike(server, 1, blow, 8, expected)
    assert all("rank 1 " in error and text in error for error in errors)
