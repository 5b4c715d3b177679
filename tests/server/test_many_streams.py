"""Many clients at once, those that leave among them."""

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.waiting import eventually

pytestmark = pytest.mark.server

LONG = {"sampling_parameters": json.dumps({"ignore_eos": True})}


def test_64_streams_answer_as_each_does_alone(caller: Caller) -> None:
    prompts = [f"{'Tell me again. ' * (i % 5)}Story {i}: 你好" for i in range(64)]

    def answer(prompt: str) -> str:
        return caller.text(text_input=prompt, max_tokens=20 + len(prompt) % 7, **LONG)

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(64) as pool:
        together = list(pool.map(answer, prompts))
    assert together == alone
    assert len(set(alone)) > 32


@pytest.mark.parametrize("model", ["ensemble", "engine"])
def test_a_client_that_leaves_frees_its_request(
    caller: Caller, server: TritonServer, model: str
) -> None:
    prompt = {"text_input": "Hello"} if model == "ensemble" else {"input_ids": [5, 6, 7]}
    # Many sequences: the engine must not be done with them before it hears that they have gone.
    parameters = json.dumps({"ignore_eos": True, "max_tokens": 480, "n": 16})

    def aborted() -> list[str]:
        return re.findall(r"request aborted uid=(\d+)", server.log)

    before = len(aborted())
    streams = [
        caller.stream(model, stream=True, sampling_parameters=parameters, **prompt)
        for _ in range(3)
    ]
    for stream in streams:
        with closing(stream):
            next(stream)
    assert eventually(lambda: len(aborted()) == before + 3), server.log[-2000:]
    # The engine checks its blocks each time it falls idle, and would end if one were lost.
    inputs = {"text_input": "~" * 10, "max_tokens": 500, "return_num_output_tokens": True, **LONG}
    assert caller.one(**inputs)["num_output_tokens"] == [500]


def test_an_http_client_that_leaves_its_stream_frees_its_request(
    slow_caller: Caller, slow_server: TritonServer
) -> None:
    before = slow_server.log.count("request aborted")
    body = json.dumps({"text_input": "Hello", "max_tokens": 480, "stream": True, **LONG})
    connection = http.client.HTTPConnection(slow_caller.http_url, timeout=30)
    connection.request("POST", "/v2/models/ensemble/generate_stream", body)
    response = connection.getresponse()
    assert response.read(2000).startswith(b"data:")
    response.close()
    connection.close()
    assert eventually(lambda: slow_server.log.count("request aborted") == before + 1)


def test_a_full_queue_refuses_at_once(caller: Caller) -> None:
    def answer(index: int) -> str:
        inputs = {"max_tokens": 100, "num_return_sequences": 4, **LONG}
        try:
            return str(caller.one(text_input=f"{index}", **inputs)["text_output"])
        except InferError as error:
            return str(error)

    with ThreadPoolExecutor(120) as pool:
        answers = list(pool.map(answer, range(120)))
    refused = [a for a in answers if "Maximum queue size of 70" in a]
    assert refused
    # The others had a slot for each of their sequences, or one of the 70 places in the queue.
    assert len(answers) - len(refused) >= (64 + 70) // 4
    assert not [a for a in answers if a not in refused and not a.startswith("[")]
