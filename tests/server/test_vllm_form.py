"""The unbatched form of the model repository, with the demo checkpoint; and the engine's death."""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from tritonclient.grpc import service_pb2_grpc

from client import InvalidRequestError, TridentClient
from engine.demo.prompts import DEMO_PROMPTS
from engine.launch.model_configs import UNARY
from engine.launch.security import HTTP_HEADER
from engine.launch.server import TritonServer
from tests.server import vllm_client
from tests.server.caller import Caller, InferError
from tests.server.conftest import VLLM_KEY as KEY
from tests.server.conftest import VLLM_MODEL as MODEL
from tests.server.engine_process import engine_process
from tests.waiting import eventually

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def vllm_caller(vllm_server: TritonServer) -> Iterator[Caller]:
    caller = Caller(vllm_server.grpc_url, vllm_server.http_url, MODEL)
    yield caller
    caller.close()


def sampling(**fields: object) -> str:
    return json.dumps(fields)


def test_vllms_own_requests(vllm_caller: Caller) -> None:
    response = vllm_caller.one(
        text_input="What is Triton?",
        stream=False,
        sampling_parameters=sampling(max_tokens="8", temperature="0", ignore_eos="true"),
        exclude_input_in_output=True,
        return_finish_reason=True,
        return_num_output_tokens=True,
    )
    assert response["finish_reason"] == ["length"]
    assert response["num_output_tokens"] == [8]
    body = {
        "text_input": "What is Triton?",
        "parameters": {"stream": False, "temperature": 0, "max_tokens": 8, "ignore_eos": True},
    }
    status, answer = vllm_caller.generate(body)
    assert status == 200
    assert answer["text_output"] == "What is Triton?" + response["text_output"][0]


GREEDY = {"temperature": "0", "max_tokens": "6", "ignore_eos": "true"}
RETURN_ALL = {
    "return_finish_reason": True,
    "return_cumulative_logprob": True,
    "return_logprobs": True,
    "return_num_input_tokens": True,
    "return_num_output_tokens": True,
}


def text_of(results: list[vllm_client.Result]) -> str:
    return b"".join(r["text_output"][0] for r in results).decode()  # type: ignore[index]


def test_a_client_of_vllm_backend_works_unchanged(vllm_server: TritonServer) -> None:
    prompts = ["Hello, my name is", "The most dangerous animal is", "The capital of France is"]
    url = vllm_server.grpc_url
    whole = vllm_client.run(url, MODEL, prompts, GREEDY)
    assert [len(results) for results in whole.values()] == [1, 1, 1]
    streamed = vllm_client.run(url, MODEL, prompts, GREEDY, stream=True, as_tensor=False)
    for number, prompt in enumerate(prompts):
        (result,) = whole[str(number)]
        assert [name for name, array in result.items() if array is not None] == ["text_output"]
        assert text_of([result]) == prompt + text_of(streamed[str(number)])


def test_its_optional_outputs_are_vllm_backends(vllm_server: TritonServer) -> None:
    parameters = {**GREEDY, "logprobs": "2"}
    url = vllm_server.grpc_url
    ((result,),) = vllm_client.run(url, MODEL, ["Hi"], parameters, **RETURN_ALL).values()
    types = {name: (array.dtype, array.shape) for name, array in result.items()}
    assert types == {
        "text_output": (np.object_, (1,)),
        "finish_reason": (np.object_, (1,)),
        "cumulative_logprob": (np.float32, (1,)),
        "logprobs": (np.object_, (1,)),
        "num_input_tokens": (np.uint32, (1,)),
        "num_output_tokens": (np.uint32, (1,)),
    }
    assert result["finish_reason"].tolist() == [b"length"]
    assert result["num_output_tokens"].tolist() == [6]
    positions = json.loads(result["logprobs"][0])
    assert len(positions) == 6
    assert all(len(p) in (2, 3) for p in positions)  # two, and the chosen one if not of them
    entries = [entry for position in positions for entry in position.values()]
    assert all(set(entry) == {"logprob", "rank", "decoded_token"} for entry in entries)
    best = sum(max(entry["logprob"] for entry in p.values()) for p in positions)
    assert result["cumulative_logprob"][0] == pytest.approx(best, rel=1e-5)

    (parts,) = vllm_client.run(url, MODEL, ["Hi"], parameters, stream=True, **RETURN_ALL).values()
    assert [p["finish_reason"][0] for p in parts] == [b"None"] * (len(parts) - 1) + [b"length"]
    assert sum(p["num_output_tokens"][0] for p in parts) == 6
    assert [x for p in parts for x in json.loads(p["logprobs"][0])] == positions
    assert parts[-1]["cumulative_logprob"] == pytest.approx(result["cumulative_logprob"])


@pytest.mark.parametrize("return_logprobs", [None, False])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_not_asked_for_are_not_sent(
    vllm_server: TritonServer, stream: bool, return_logprobs: bool | None
) -> None:
    flags = {} if return_logprobs is None else {"return_logprobs": return_logprobs}
    parameters = {**GREEDY, "logprobs": "2"}
    url = vllm_server.grpc_url
    (parts,) = vllm_client.run(url, MODEL, ["Hi"], parameters, stream=stream, **flags).values()
    assert all(part["logprobs"] is None for part in parts)
    assert all(part["text_output"] is not None for part in parts)


def test_logprobs_are_null_without_the_parameter(vllm_server: TritonServer) -> None:
    url = vllm_server.grpc_url
    ((result,),) = vllm_client.run(url, MODEL, ["Hi"], GREEDY, **RETURN_ALL).values()
    assert result["logprobs"].tolist() == [b"null"]
    assert result["cumulative_logprob"][0] < 0


def test_our_client_calls_it_by_that_name(vllm_server: TritonServer) -> None:
    with TridentClient(vllm_server.grpc_url, model=MODEL) as client:
        answer = client.generate("Hi", max_tokens=5, ignore_eos=True)
        assert answer.num_output_tokens == 5
        assert client.health().state == "ready"
    with (
        TridentClient(vllm_server.grpc_url) as client,
        pytest.raises(InvalidRequestError, match="unknown model: 'ensemble'"),
    ):
        client.generate("Hi")


def test_what_vllm_backend_has_and_we_do_not_is_named(vllm_caller: Caller) -> None:
    for inputs in ({"image": ["aGk="]}, {"embedding_request": "{}"}):
        (name,) = inputs
        with pytest.raises(InferError, match=f"{name}: not supported"):
            vllm_caller.one(text_input="Hi", **inputs)
    with pytest.raises(InferError, match="lora_name: not supported"):
        vllm_caller.one(text_input="Hi", sampling_parameters=sampling(lora_name="x"))


def test_the_demo_answers_in_many_scripts(vllm_caller: Caller) -> None:
    """Every prompt at once as chats; each stream equals its unstreamed answer."""
    answers: dict[str, str] = {}

    def ask(prompt: str) -> None:
        messages = json.dumps([{"role": "user", "content": prompt}])
        answers[prompt] = vllm_caller.text(messages=messages)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in DEMO_PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for prompt in DEMO_PROMPTS:
        messages = json.dumps([{"role": "user", "content": prompt}])
        assert vllm_caller.one(messages=messages)["text_output"] == [answers[prompt]]
    everything = "".join(answers.values())
    assert re.search(r"[\u4e00-\u9fff]", everything), everything
    assert re.search(r"[\U0001f300-\U0001faff]", everything), everything
    assert "\N{REPLACEMENT CHARACTER}" not in everything


def test_a_burst_of_requests_does_not_stall_the_tokenizer(
    vllm_caller: Caller, vllm_server: TritonServer
) -> None:
    request = vllm_caller.request("tokenizer", text_input="Hello")
    with grpc.insecure_channel(vllm_server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        calls = [stub.ModelInfer.future(request, timeout=20) for _ in range(1500)]
        assert [error for call in calls if (error := call.exception())] == []


def stub_processes(server: TritonServer) -> set[int]:
    return {process.pid for process in psutil.Process(server.pid).children()}


def infer(caller: Caller, prompt: str, **values: int) -> str:
    """Ask the model that answers once as LiteLLM's route `/infer` does: each shape is [1]."""
    tensors = [{"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}]
    for name, value in values.items():
        tensors.append({"name": name, "shape": [1], "datatype": "INT32", "data": [value]})
    status, text = caller.post(f"/v2/models/{UNARY}/infer", {"inputs": tensors})
    assert status == 200, text
    (output,) = json.loads(text)["outputs"]
    assert (output["name"], output["shape"]) == ("text_output", [1])
    return str(output["data"][0])


def test_plain_infer_takes_litellms_shapes(vllm_caller: Caller) -> None:
    inputs = {"text_input": "The capital of France is", "max_tokens": 6}
    assert (
        infer(vllm_caller, "The capital of France is", max_tokens=6)
        == (vllm_caller.one(**inputs)["text_output"][0])
    )


@pytest.mark.parametrize("stage", ["detokenizer", "engine", "tokenizer", UNARY])
def test_each_stage_can_be_reloaded_alone(
    vllm_caller: Caller, vllm_server: TritonServer, vllm_repository: Path, stage: str
) -> None:
    before = vllm_caller.one(text_input="Hi", sampling_parameters=sampling(max_tokens=4))
    infer(vllm_caller, "Hi", max_tokens=4)
    stubs = stub_processes(vllm_server)
    (vllm_repository / stage / "1" / "model.py").touch()  # Triton reloads what has changed
    url = f"http://{vllm_server.http_url}/v2/repository/models/{stage}/load"
    request = urllib.request.Request(url, b"{}", {HTTP_HEADER: KEY})
    with urllib.request.urlopen(request, timeout=60):
        pass
    assert len(stub_processes(vllm_server) - stubs) == 1
    assert eventually(
        lambda: len(stub_processes(vllm_server)) == len(stubs)
    )  # the old one ends with its engine
    after = vllm_caller.one(text_input="Hi", sampling_parameters=sampling(max_tokens=4))
    assert after == before
    assert infer(vllm_caller, "Hi", max_tokens=4) == before["text_output"][0]


def test_when_the_engine_dies_everybody_hears_of_it(
    vllm_caller: Caller, vllm_server: TritonServer
) -> None:
    parameters = sampling(ignore_eos=True, max_tokens=200)
    streams = [
        vllm_caller.stream(text_input="Hi", stream=True, sampling_parameters=parameters)
        for _ in range(3)
    ]
    for stream in streams:
        next(stream)
    os.kill(engine_process(vllm_server).pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(InferError, match="the engine process has died; the request is lost"):
            list(stream)
    with pytest.raises(InferError, match="the engine process"):
        vllm_caller.one(text_input="Hi")
    with TridentClient(vllm_server.grpc_url, model=MODEL) as client:
        assert eventually(client.is_ready)  # other tests use this server
