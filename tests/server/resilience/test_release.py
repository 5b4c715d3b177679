"""Whatever ends a request of the ensemble, Triton lets go of it, and the server ends cleanly."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from client import TridentClient
from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.engine_process import engine_process
from tests.waiting import eventually

pytestmark = pytest.mark.server

NUM_STREAMS = 16


def long_inputs(**params: Any) -> dict[str, Any]:
    fields = {"ignore_eos": True, "max_tokens": 480, **params}
    return {"stream": True, "text_input": "Hello", "sampling_parameters": json.dumps(fields)}


def read_to_end(stream: Iterator[dict[str, list[Any]]]) -> tuple[str, str]:
    """Return the text of a stream and the error that ended it."""
    text = ""
    try:
        for response in stream:
            text += response.get("text_output", [""])[0]
    except InferError as error:
        return text, str(error)
    return text, ""


@pytest.fixture(scope="module")
def caller(killable: TritonServer) -> Iterator[Caller]:
    with closing(Caller(killable.grpc_url, killable.http_url)) as caller:
        yield caller


def test_a_flood_before_the_tokenizer_is_refused_and_the_rest_is_answered(
    killable: TritonServer, caller: Caller
) -> None:
    # Each takes the tokenizer milliseconds, to be refused for its length in the end.
    chat = json.dumps([{"role": "user", "content": "x" * 80}] * 1000)
    request = caller.request("tokenizer", messages=chat)
    with grpc.insecure_channel(killable.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(request, timeout=60) for _ in range(400)]
        errors = [call.exception() for call in calls]
    refused = [e for e in errors if "Maximum queue size of 68 requests" in e.details()]
    assert all(e.code() == grpc.StatusCode.UNAVAILABLE for e in refused)
    assert len(refused) > 0
    others = [e for e in errors if e not in refused]
    assert len(others) >= 68
    assert all(e.details().startswith("messages: ") for e in others)
    assert read_to_end(caller.stream(**long_inputs(max_tokens=5)))[1] == ""


def test_a_burst_that_fits_into_free_slots_is_served(caller: Caller) -> None:
    def answer(index: int) -> str:
        return read_to_end(caller.stream(**long_inputs(max_tokens=5, seed=index)))[1]

    with ThreadPoolExecutor(64) as pool:
        assert set(pool.map(answer, range(64))) == {""}


def test_requests_that_the_engine_took_along_are_released(
    killable: TritonServer, caller: Caller
) -> None:
    """Their errors must not overtake what is still in the detokenizer, which is kept busy here."""
    begun = threading.Barrier(NUM_STREAMS + 1)

    def answer(index: int) -> str:
        stream = caller.stream(return_logprobs=True, **long_inputs(n=4, logprobs=20))
        next(stream)
        begun.wait(60)
        return read_to_end(stream)[1]

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        answers = [pool.submit(answer, index) for index in range(NUM_STREAMS)]
        begun.wait(60)
        engine_process(killable).kill()
        errors = [each.result() for each in answers]
    # Some may have had their last tokens under way.
    assert {error for error in errors if error} == {
        "in ensemble 'ensemble', the engine process has died; the request is lost "
        "[code=unavailable]"
    }
    with TridentClient(killable.grpc_url) as client:
        assert eventually(client.is_ready)  # other tests use this server
