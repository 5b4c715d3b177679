"""Structured output through the ensemble's inputs, in every form."""

import json
import re
import threading
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError

pytestmark = pytest.mark.server

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "sub"]}, "value": {"type": "boolean"}},
    "required": ["name", "value"],
    "additionalProperties": False,
}
ASK = {
    "text_input": "The quick brown fox",
    "max_tokens": 200,
    "temperature": 1.5,
    "seed": 4,
    "exclude_input_in_output": True,
    "return_finish_reason": True,
}


def ask(caller: Caller, fields: dict[str, Any] | None = None, **inputs: Any) -> str:
    parameters = {} if fields is None else {"sampling_parameters": json.dumps(fields)}
    response = caller.one(**{**ASK, **parameters, **inputs})
    assert response["finish_reason"] == ["stop"]
    [text] = response["text_output"]
    return str(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    ],
)
def test_documents_of_a_schema(caller: Caller, fields: dict[str, Any]) -> None:
    text = ask(caller, {**fields, "max_tokens": 480})
    Draft202012Validator(SCHEMA).validate(json.loads(text))


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": r"\d{3}-\d{4}"}}, r"\d{3}-\d{4}"),
        ({"guided_regex": "[a-c]{7}"}, "[a-c]{7}"),
        ({"guided_choice": ["left", "right"]}, "left|right"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]{3}'}}, "x[0-9]{3}"),
        ({"guided_grammar": 'start: "y" /[0-9]{2}/'}, "y[0-9]{2}"),
    ],
)
def test_vllm_forms(caller: Caller, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, ask(caller, fields))


@pytest.mark.parametrize(
    ("guide_type", "guide", "pattern"),
    [
        ("json_schema", json.dumps({"enum": ["one", "two"]}), '"(one|two)"'),
        ("regex", "[a-c]{7}", "[a-c]{7}"),
        ("ebnf_grammar", 'root ::= "x" [0-9]{3}', "x[0-9]{3}"),
    ],
)
def test_tensorrt_llm_forms(caller: Caller, guide_type: str, guide: str, pattern: str) -> None:
    inputs = {"guided_decoding_guide_type": guide_type, "guided_decoding_guide": guide}
    assert re.fullmatch(pattern, ask(caller, **inputs))


def test_request_parameters_over_http(caller: Caller) -> None:
    status, body = caller.generate({**ASK, "guided_regex": "[ab]{4}"})
    assert status == 200, body
    assert re.fullmatch("[ab]{4}", body["text_output"])


def test_the_engine_called_directly(caller: Caller) -> None:
    fields = {"structured_outputs": {"regex": "[ab]{4}"}, "max_tokens": 50}
    response = caller.one("engine", input_ids=[5, 6, 7], sampling_parameters=json.dumps(fields))
    assert response["finish_reason"] == ["stop"]


def test_a_stream(caller: Caller) -> None:
    fields = json.dumps({"structured_outputs": {"regex": "[a-z]{30}"}})
    responses = caller.collect(**ASK, sampling_parameters=fields, stream=True)
    assert re.fullmatch("[a-z]{30}", "".join(r["text_output"][0] for r in responses))


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"guided_json": {"not": {}}}, 'guided_json: #: keyword "not" is not enforced'),
        ({"guided_json": {"enum": []}}, "guided_json: Unsatisfiable schema"),
        ({"guided_regex": r"(a)\1"}, "guided_regex: .*backreferences"),
        ({"guided_grammar": "root ::= ("}, r"guided_grammar: Expected '\)' at line 1"),
        ({"guided_choice": []}, "guided_choice: must have at least one choice"),
        (
            {"guided_regex": "a", "guided_json": {}},
            "guided_json, guided_regex: give one of them",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be"),
        ({"structured_outputs": {"choice": 3}}, "structured_outputs.choice: must be a list"),
    ],
)
def test_bad_grammars_are_named(caller: Caller, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(InferError, match=fault):
        ask(caller, fields)


def test_a_grammar_that_explodes_delays_no_other_request(
    caller: Caller, server: TritonServer
) -> None:
    patterns = [{"pattern": f"a.{{{i}}}b"} for i in range(1, 30)]
    hostile = {"guided_json": {"type": "string", "allOf": patterns}}
    refusals: list[str] = []

    def send() -> None:
        other = Caller(server.grpc_url, server.http_url)
        try:
            ask(other, hostile)
        except InferError as error:
            refusals.append(str(error))
        finally:
            other.close()

    thread = threading.Thread(target=send)
    thread.start()
    num_answers, began = 0, time.monotonic()
    while thread.is_alive() and time.monotonic() - began < 60:
        caller.one(text_input="Hello", max_tokens=4)
        num_answers += 1
    thread.join()
    assert num_answers > 5
    [refusal] = refusals
    assert "is too complex: compiling it takes more than 2 s" in refusal
