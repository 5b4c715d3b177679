"""A request that used to end the engine ends alone; others keep streaming."""

import json
import queue
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from engine.launch.server import TritonServer
from engine.text.tokenizer import Tokenizer
from tests.server.caller import Caller
from tests.server.raw_requests import request
from tests.waiting import eventually

pytestmark = pytest.mark.server

FILLER = {"n": 64, "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def health(caller: Caller) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(caller.one("engine", health=True)["health"][0])
    return answer


@pytest.fixture
def hostile(checkpoint: Path) -> dict[str, Any]:
    """A prompt that ends inside a UTF-8 character, and U+FFFD as its stop string."""
    convert = Tokenizer.from_pretrained(checkpoint).hf_tokenizer.convert_tokens_to_ids
    params = {"stop": ["\N{REPLACEMENT CHARACTER}"], "max_tokens": 20, "ignore_eos": True}
    return {
        "input_ids": [5, 6, convert("ä")],  # so the vocabulary spells the byte E4
        "sampling_parameters": json.dumps(params),
        "stream": True,
    }


@pytest.fixture
def others(caller: Caller) -> Iterator[Iterator[dict[str, list[Any]]]]:
    """Streams that hold all slots, so that what comes now waits in the queue."""
    streams = caller.stream(
        "engine", input_ids=[5, 6, 7], sampling_parameters=json.dumps(FILLER), stream=True
    )
    next(streams)
    restarts = health(caller)["num_restarts"]
    yield streams
    assert next(streams)["token_ids"]
    streams.close()
    assert health(caller)["num_restarts"] == restarts


def wait_for(caller: Caller, num_in_flight: int) -> None:
    assert eventually(lambda: health(caller)["num_in_flight"] == num_in_flight, 30)


@pytest.mark.usefixtures("others")
def test_a_deadline_in_the_queue_is_no_stop_string(caller: Caller, hostile: dict[str, Any]) -> None:
    for _ in range(3):
        (answer,) = caller.collect("engine", timeout=1, **hostile)
        assert answer["finish_reason"] == ["abort"]
        assert answer["token_ids"] == []


@pytest.mark.usefixtures("others")
def test_a_stop_request_in_the_queue_is_no_stop_string(
    caller: Caller, hostile: dict[str, Any]
) -> None:
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(caller.collect, "engine", request_id="hostile", **hostile)
        wait_for(caller, 2)
        caller.one("engine", request_id="hostile", stop=True)
        (answer,) = answers.result()
    assert answer["finish_reason"] == ["abort"]
    assert answer["token_ids"] == []


@pytest.mark.usefixtures("others")
def test_a_client_that_goes_while_it_waits_is_no_stop_string(
    server: TritonServer, caller: Caller, hostile: dict[str, Any]
) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        requests: queue.SimpleQueue[service_pb2.ModelInferRequest | None] = queue.SimpleQueue()
        requests.put(caller.request("engine", **hostile))
        call = stub.ModelStreamInfer(iter(requests.get, None))
        wait_for(caller, 2)
        call.cancel()
        wait_for(caller, 1)
        requests.put(None)


def test_text_of_the_prompt_alone_ends_no_request(caller: Caller, hostile: dict[str, Any]) -> None:
    answers = caller.collect("engine", **hostile)
    assert sum(len(answer["token_ids"]) for answer in answers) > 0
    assert answers[-1]["finish_reason"] != ["abort"]


def test_a_client_that_asks_for_one_output_of_many_ends_no_stage(
    stub: service_pb2_grpc.GRPCInferenceServiceStub,
) -> None:
    """Triton removes the others from the response of the stage that made them."""
    text = struct.pack("<I", 2) + b"hi"
    message = request("tokenizer", ("text_input", "BYTES", [1, 1], text))
    message.outputs.add(name="input_ids")
    for _ in range(20):
        answer = stub.ModelInfer(message, timeout=30)
        assert [output.name for output in answer.outputs] == ["input_ids"]
