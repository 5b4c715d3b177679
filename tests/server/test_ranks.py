"""A model in two processes through the real server: the same text, errors with the rank."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import psutil
import pytest

from engine import LLM, SamplingParams
from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.engine_process import engine_process
from tests.server.scraping import scrape
from tests.waiting import eventually

PROMPT = "to be or not to be"
TOKENS = 24

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[TritonServer]:
    settings = {"model": str(checkpoint), "dtype": "float32", "tensor_parallel_size": 2}
    with TritonServer(
        {**settings, "heartbeat_timeout_s": 2}, ports=0, start_timeout_s=180
    ) as server:
        yield server


@pytest.fixture(scope="module")
def caller(server: TritonServer) -> Iterator[Caller]:
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        yield caller


def inputs(num_tokens: int) -> dict[str, Any]:
    params = {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    return {
        "text_input": PROMPT,
        "exclude_input_in_output": True,
        "sampling_parameters": json.dumps(params),
    }


def rank_process(server: TritonServer) -> psutil.Process:
    (rank,) = engine_process(server).children()
    assert "engine.service.rank" in rank.cmdline()
    return rank


def end_of(server: TritonServer, begun: Event) -> str:
    """Return the error that ends a long stream; set `begun` at its first response."""
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        try:
            for _ in caller.stream(**inputs(480), stream=True):
                begun.set()
        except InferError as error:
            return str(error)
    return ""


def answers(server: TritonServer, expected: str) -> bool:
    with closing(Caller(server.grpc_url, server.http_url)) as caller:
        try:
            return caller.text(**inputs(TOKENS)) == expected
        except (InferError, grpc.RpcError):
            return False


def test_ranks_answer_as_one_process_does(
    server: TritonServer, caller: Caller, checkpoint: Path
) -> None:
    llm = LLM(str(checkpoint), dtype="float32")
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    [result] = llm.generate(PROMPT, sampling, use_tqdm=False)
    assert caller.text(**inputs(TOKENS)) == result.outputs[0].text
    assert "rank 1: " in server.log
    for rank in range(2):
        assert eventually(lambda rank=rank: scrape(server)[f"rank_up {rank}"] == 1)
    name = "rank_sum_wait_seconds_total"

    def is_counted() -> bool:
        caller.text(**inputs(TOKENS))
        return sum(scrape(server)[f"{name} {rank}"] for rank in range(2)) > 0

    assert eventually(is_counted)


@pytest.mark.parametrize(
    ("strike", "text"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "")],
    ids=["killed", "stopped"],
)
def test_rank_that_fails_ends_all_streams_with_its_name(
    server: TritonServer, caller: Caller, strike: signal.Signals, text: str
) -> None:
    expected = caller.text(**inputs(TOKENS))
    rank, engine = rank_process(server), engine_process(server)
    begun = [Event() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(end_of, server, each) for each in begun]
        assert all(each.wait(60) for each in begun)
        rank.send_signal(strike)
        ends = [stream.result(60) for stream in streams]
    for end in ends:
        assert "rank 1 " in end
        assert text in end
    assert eventually(lambda: not rank.is_running())
    assert eventually(lambda: not engine.is_running())
    assert eventually(lambda: answers(server, expected))
