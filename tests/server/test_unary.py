"""Plain `infer()`: a model that answers once gives what the ensemble gives, or the same error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2_grpc

from engine.launch.model_configs import UNARY
from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError, read_outputs
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.engine_process import engine_process
from tests.waiting import eventually

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quiet_log")]

PROMPT = "Hello, 你好 wörld"
LONG = {"text_input": "ab", "max_tokens": 400, "sampling_parameters": '{"ignore_eos": true}'}
# What differs between two runs of a request: times, and what the prefix cache had of it.
OF_THE_RUN = (
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("num_cached_tokens", "kv_cache_reused_blocks", "kv_cache_alloc_new_blocks"),
    "kv_cache_alloc_total_blocks",
)


class Unary:
    """Sends plain requests to the model that answers once."""

    def __init__(self, server: TritonServer, caller: Caller) -> None:
        self._caller = caller
        self._channel = grpc.insecure_channel(server.grpc_url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.server = server

    def future(self, model: str = UNARY, **inputs: Any) -> grpc.Future:
        request = self._caller.request(model, **inputs)
        return self._stub.ModelInfer.future(request, timeout=60)

    def one(self, **inputs: Any) -> dict[str, list[Any]]:
        return read_outputs(self.future(**inputs).result())

    def num_in_flight(self) -> int:
        health = self._caller.one("engine", health=True)["health"][0]
        return int(json.loads(health)["num_in_flight"])

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def unary(server: TritonServer, caller: Caller) -> Iterator[Unary]:
    unary = Unary(server, caller)
    yield unary
    unary.close()


@pytest.fixture(scope="module")
def slow(slow_server: TritonServer, slow_caller: Caller) -> Iterator[Unary]:
    unary = Unary(slow_server, slow_caller)
    yield unary
    unary.close()


def sampling(**fields: object) -> str:
    return json.dumps(fields)


EVERYTHING = {
    "return_finish_reason": True,
    "return_stop_reason": True,
    "return_log_probs": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
    "return_num_cached_tokens": True,
    "return_perf_metrics": True,
    "return_sections": True,
}
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"text_input": PROMPT, "max_tokens": 20},
    "messages": {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": 8},
    "ids": {"input_ids": [5, 6, 7], "max_tokens": 8},
    "everything": {
        "text_input": PROMPT,
        "sampling_parameters": sampling(
            n=3,
            temperature=1.0,
            seed=1,
            max_tokens=12,
            logprobs=2,
            prompt_logprobs=1,
            ignore_eos=True,
        ),
        **EVERYTHING,
    },
    "beams": {"text_input": "ab", "beam_width": 2, "max_tokens": 6, "return_log_probs": True},
    "embedding": {"text_input": "ab", "sampling_parameters": sampling(return_embedding=True)},
    "special": {"text_input": "ab", "sampling_parameters": sampling(skip_special_tokens=False)},
}


@pytest.mark.parametrize("inputs", REQUESTS.values(), ids=REQUESTS)
def test_infer_gives_what_the_ensemble_gives(
    unary: Unary, caller: Caller, inputs: dict[str, Any]
) -> None:
    expected = caller.one(**inputs)
    got = unary.one(**inputs)
    del expected["final"]
    assert sorted(got) == sorted(expected)
    same = [name for name in got if name not in OF_THE_RUN]
    assert {name: got[name] for name in same} == {name: expected[name] for name in same}


@pytest.mark.parametrize("module", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])
def test_tritonclients_infer_works(server: TritonServer, caller: Caller, module: Any) -> None:
    url = server.grpc_url if module is tritonclient.grpc else server.http_url
    text = module.InferInput("text_input", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([[PROMPT.encode()]], dtype=object))
    max_tokens = module.InferInput("max_tokens", [1, 1], "INT32")
    max_tokens.set_data_from_numpy(np.array([[9]], dtype=np.int32))
    with module.InferenceServerClient(url) as client:
        result = client.infer(UNARY, [text, max_tokens], request_id="a")
    expected = caller.one(text_input=PROMPT, max_tokens=9)["text_output"]
    assert [each.decode() for each in result.as_numpy("text_output")] == expected
    assert result.get_response() if module is tritonclient.http else True


@pytest.mark.parametrize("nested", [False, True])
def test_infer_by_kserves_client_works(caller: Caller, nested: bool) -> None:
    """The JSON of version 2 of its protocol, as its `InferRequest.to_rest` writes it."""
    values = (("text_input", "BYTES", PROMPT), ("max_tokens", "INT32", 9))
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": kind, "data": [[value]] if nested else [value]}
        for name, kind, value in values
    ]
    outputs = [{"name": "text_output"}]
    body = {"id": "a", "inputs": inputs, "outputs": outputs, "parameters": {}}
    status, text = caller.post(f"/v2/models/{UNARY}/infer", body)
    assert status == 200, text
    answer = json.loads(text)
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("a", UNARY, "1")
    [output] = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("text_output", "BYTES", [1])
    assert output["data"] == caller.one(text_input=PROMPT, max_tokens=9)["text_output"]


@pytest.mark.parametrize(
    ("model", "inputs"), [("ensemble", {"text_input": "a"}), ("engine", {"input_ids": [1]})]
)
def test_infer_of_a_model_that_streams_is_not_implemented(
    unary: Unary, caller: Caller, model: str, inputs: dict[str, Any]
) -> None:
    """By Triton: these answer as often as they like, also where they do so once."""
    with pytest.raises(grpc.RpcError) as caught:
        unary.future(model, **inputs).result()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "decoupled" in caught.value.details()
    tensors = [
        {
            "name": name,
            "shape": [1, 1],
            "datatype": "INT32" if isinstance(value, list) else "BYTES",
            "data": value if isinstance(value, list) else [value],
        }
        for name, value in inputs.items()
    ]
    status, text = caller.post(f"/v2/models/{model}/infer", {"inputs": tensors})
    assert (status, "decoupled" in json.loads(text)["error"]) == (501, True)
    assert unary.one(text_input="a", max_tokens=1)["text_output"]  # nothing is held up


def test_http_generate_works(caller: Caller) -> None:
    body = {"text_input": PROMPT, "max_tokens": 9}
    status, answer = caller.generate(body, UNARY)
    assert (status, answer["text_output"]) == (200, caller.generate(body)[1]["text_output"])


ERRORS: dict[str, tuple[dict[str, Any], grpc.StatusCode, int, str]] = {
    "stream": (
        {"text_input": "a", "stream": True},
        *(grpc.StatusCode.UNIMPLEMENTED, 501),
        "stream: must be false for a model that answers once; call ensemble to stream",
    ),
    "value": (
        {"text_input": "a", "temperature": -1.0},
        *(grpc.StatusCode.INVALID_ARGUMENT, 400),
        "temperature: ",
    ),
    "nothing": (
        {"max_tokens": 4},
        *(grpc.StatusCode.INVALID_ARGUMENT, 400),
        "text_input: is missing",
    ),
    "length": (
        {"text_input": "ab " * MAX_MODEL_LEN},
        *(grpc.StatusCode.INVALID_ARGUMENT, 400),
        "text_input: ",
    ),
    "at the engine": (
        {"text_input": "a", "sampling_parameters": sampling(logprobs=1000)},
        *(grpc.StatusCode.INVALID_ARGUMENT, 400),
        "logprobs: must be at most ",
    ),
    "stop without an id": (
        {"stop": True},
        *(grpc.StatusCode.INVALID_ARGUMENT, 400),
        "stop: needs a request id",
    ),
    "unsupported": (
        {"text_input": "a", "image": ["x"]},
        *(grpc.StatusCode.UNIMPLEMENTED, 501),
        "image: not supported",
    ),
}


@pytest.mark.parametrize(("inputs", "code", "status", "text"), ERRORS.values(), ids=ERRORS)
def test_an_error_keeps_its_status(
    unary: Unary, caller: Caller, inputs: dict[str, Any], code: Any, status: int, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        unary.one(**inputs)
    assert caught.value.code() is code
    assert text in caught.value.details()
    types = {"temperature": "FP32", "max_tokens": "INT32", "stream": "BOOL", "stop": "BOOL"}
    tensors = [
        {
            "name": name,
            "datatype": types.get(name, "BYTES"),
            "shape": [1, 1],
            "data": value if isinstance(value, list) else [value],
        }
        for name, value in inputs.items()
    ]
    got, body = caller.post(f"/v2/models/{UNARY}/infer", {"inputs": tensors})
    assert got == status
    assert text in json.loads(body)["error"]


def test_a_cancelled_request_is_aborted(slow: Unary) -> None:
    future = slow.future(request_id="leaves", **LONG)
    assert eventually(lambda: slow.num_in_flight() == 1)
    future.cancel()
    assert eventually(lambda: slow.num_in_flight() == 0)
    assert "request cancelled request_id=leaves " in slow.server.log


def test_a_deadline_ends_a_request_with_what_it_has(slow: Unary) -> None:
    answer = slow.one(
        timeout=1_000_000, return_finish_reason=True, return_num_output_tokens=True, **LONG
    )
    assert answer["finish_reason"] == ["abort"]
    assert 0 < answer["num_output_tokens"][0] < 400


@pytest.mark.parametrize("through", [UNARY, "ensemble"])
def test_stop_ends_a_request_with_what_it_has(
    slow: Unary, slow_caller: Caller, through: str
) -> None:
    future = slow.future(request_id="unary-7", return_finish_reason=True, **LONG)
    assert eventually(lambda: slow.num_in_flight() == 1)
    answer = slow_caller.one(through, request_id="unary-7", stop=True, return_finish_reason=True)
    assert (answer["finish_reason"], answer["text_output"]) == (["abort"], [""])
    assert read_outputs(future.result())["finish_reason"] == ["abort"]


def test_more_than_may_wait_are_refused(slow: Unary) -> None:
    """And when the clients of the others leave, nothing is left of them."""
    futures = [slow.future(**LONG) for _ in range(420)]  # 256 run, 70 wait
    assert eventually(lambda: sum(future.done() for future in futures) >= 50)
    for future in futures:
        if future.done():
            assert future.exception().code() is grpc.StatusCode.UNAVAILABLE
            assert "Maximum queue size of " in future.exception().details()
        else:
            future.cancel()
    assert eventually(lambda: slow.num_in_flight() == 0)


def test_many_at_once_are_all_answered(unary: Unary) -> None:
    inputs = {"text_input": PROMPT, "max_tokens": 5}
    expected = unary.one(**inputs)
    futures = [unary.future(**inputs) for _ in range(120)]
    assert all(read_outputs(future.result()) == expected for future in futures)


def test_when_the_engine_dies_its_requests_end(unary: Unary, caller: Caller) -> None:
    def is_ready() -> bool:
        return caller.generate({"health": True}, model="engine")[0] == 200

    future = unary.future(**LONG)
    assert eventually(lambda: unary.num_in_flight() == 1)
    engine_process(unary.server).kill()
    error = future.exception()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "the engine process has died; the request is lost" in error.details()
    assert eventually(is_ready)
    assert unary.one(text_input="ab", max_tokens=4)["text_output"]


def test_it_answers_once_only(caller: Caller) -> None:
    with pytest.raises(InferError, match="stream: must be false"):
        caller.one(UNARY, text_input="a", stream=True)
