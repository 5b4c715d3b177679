"""Requests that are no prompts: how things stand, and the end of another request."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.engine_process import engine_process
from tests.waiting import eventually

pytestmark = pytest.mark.server

LONG = {"text_input": "ab", "max_tokens": 400, "stream": True, "return_finish_reason": True}


def test_health_tells_that_the_engine_is_ready(caller: Caller) -> None:
    health = json.loads(caller.one("engine", health=True)["health"][0])
    assert health["state"] == "ready"
    assert health["num_in_flight"] == 0
    assert (health["has_reasoning"], health["reasoning_switches"]) == (False, [])
    assert health["takes_late_system"]
    assert (health["do_sample"], health["sampling_defaults"]) == (False, {})
    status, body = caller.generate({"health": True}, model="engine")
    assert status == 200
    assert json.loads(body["health"])["state"] == "ready"


def test_health_tells_the_truth_while_the_engine_process_is_gone(
    server: TritonServer, caller: Caller
) -> None:
    restarts = json.loads(caller.one("engine", health=True)["health"][0])["num_restarts"]
    stream = caller.stream(sampling_parameters='{"ignore_eos": true}', **LONG)
    next(stream)
    os.kill(engine_process(server).pid, signal.SIGKILL)
    with pytest.raises(InferError, match="the engine process has died; the request is lost"):
        list(stream)
    with pytest.raises(InferError, match="the engine process"):
        caller.one("engine", health=True)
    with pytest.raises(InferError, match="the engine process"):
        caller.one(text_input="ab", max_tokens=4)
    assert eventually(lambda: caller.generate({"health": True}, model="engine")[0] == 200)
    assert caller.one(text_input="ab", max_tokens=4)
    health = json.loads(caller.one("engine", health=True)["health"][0])
    assert health["num_restarts"] == restarts + 1


@pytest.mark.parametrize("through", ["ensemble", "engine"])
def test_stop_ends_the_request_of_the_same_id_with_what_it_has(
    slow_caller: Caller, through: str
) -> None:
    stream = slow_caller.stream(request_id="7", sampling_parameters='{"ignore_eos": true}', **LONG)
    responses = [next(stream)]
    answer = slow_caller.one(through, request_id="7", stop=True)
    responses += stream
    reasons = [response["finish_reason"][0] for response in responses]
    assert reasons == ["None"] * (len(reasons) - 1) + ["abort"]
    if through == "engine":
        assert answer["finish_reason"] == ["abort"]
        assert answer["token_ids"] == []
    else:
        assert answer["text_output"] == [""]


def test_stop_reaches_nobody_else(caller: Caller) -> None:
    solo = caller.text(text_input="ab", max_tokens=60)
    stream = caller.stream(request_id="8", text_input="ab", max_tokens=60, stream=True)
    responses = [next(stream)]
    answer = caller.one(request_id="9", stop=True, return_finish_reason=True)
    assert answer["finish_reason"] == ["abort"]
    assert "".join(r["text_output"][0] for r in [*responses, *stream]) == solo


@pytest.mark.parametrize("model", ["ensemble", "engine"])
def test_stop_needs_an_id(caller: Caller, model: str) -> None:
    with pytest.raises(InferError, match="stop: needs a request id"):
        caller.one(model, stop=True)


def test_a_request_to_the_engine_needs_ids(caller: Caller) -> None:
    with pytest.raises(InferError, match="input_ids: is missing"):
        caller.one("engine", stream=True)


def test_http_has_ids_too(slow_caller: Caller) -> None:
    body = {"sampling_parameters": '{"ignore_eos": true}', "id": "over http", **LONG}
    with ThreadPoolExecutor() as pool:
        events = pool.submit(slow_caller.generate_stream, body)
        assert eventually(
            lambda: json.loads(slow_caller.one("engine", health=True)["health"][0])["num_in_flight"]
        )
        status, answer = slow_caller.generate({"stop": True, "id": "over http"})
        assert (status, answer["text_output"]) == (200, "")
        reasons = [event["finish_reason"] for event in events.result()]
    assert reasons[-1] == "abort"
