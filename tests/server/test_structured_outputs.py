"""Structured output through the ensemble's inputs, in every form."""

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from jsonschema import Draft202012Validator

from engine.bench.tool_sets import ToolSets, calls_schema, calls_tag
from engine.launch.server import TritonServer
from tests.factories.grammars import demo_tokenizer
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

_TOKENIZER = demo_tokenizer()
# Ends strings and arrays sooner, and leaves out spaces between them.
_CLOSING = {_TOKENIZER.encode(each, add_special_tokens=False)[-1]: 4.0 for each in '"}]'}
_CLOSING |= {_TOKENIZER.encode(each, add_special_tokens=False)[-1]: -9.0 for each in "\n\r\t"}


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


_NUMBER = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"json": _NUMBER}}, r'\{\s*"a"\s*:\s*\d+\s*\}'),
        (
            {"guided_json": _NUMBER, "guided_whitespace_pattern": "[ ]?"},
            r'\{ ?"a" ?: ?\d+ ?\}',
        ),
        (
            {"structured_outputs": {"json": _NUMBER, "disable_any_whitespace": True}},
            r'\{"a":\d+\}',
        ),
    ],
)
def test_a_document_at_temperature_0_is_not_blanks_without_end(
    caller: Caller, fields: dict[str, Any], pattern: str
) -> None:
    text = ask(caller, {**fields, "temperature": 0, "max_tokens": 300}, text_input="Hello")
    assert re.fullmatch(pattern, text)


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
            "guided_json, guided_regex: give only one",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type: must be"),
        ({"structured_outputs": {"choice": 3}}, "structured_outputs.choice: must be a list"),
    ],
)
def test_bad_grammars_are_named(caller: Caller, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(InferError, match=fault):
        ask(caller, fields)


def test_a_tool_set_of_100_kb(caller: Caller) -> None:
    tools = ToolSets(7).tools(100_000)
    schema = calls_schema(tools)
    fields = {"structured_outputs": {"json": schema}, "max_tokens": 480, "logit_bias": _CLOSING}
    asked = {**ASK, "sampling_parameters": json.dumps(fields), "temperature": 1.0}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: caller.one(**{**asked, "seed": seed}), range(8)))
    finished = [each["text_output"][0] for each in answers if each["finish_reason"] == ["stop"]]
    assert finished
    for text in finished:
        Draft202012Validator(schema).validate(json.loads(text))
    tagged = {"structured_outputs": {"structural_tag": calls_tag(tools)}, "max_tokens": 30}
    assert caller.one(**{**ASK, "sampling_parameters": json.dumps(tagged)})["text_output"]


def test_one_grammar_for_many_requests(caller: Caller) -> None:
    fields = json.dumps({"structured_outputs": {"regex": "[a-z]{3}[0-9]{3}"}, "max_tokens": 20})
    asked = {name: value for name, value in ASK.items() if name != "seed"}
    asked |= {"sampling_parameters": fields}
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda seed: caller.text(**asked, seed=seed), range(40)))
    assert all(re.fullmatch("[a-z]{3}[0-9]{3}", text) for text in answers)
    assert len(set(answers)) > 10


def test_requests_that_end_while_many_large_grammars_compile(
    caller: Caller, server: TritonServer
) -> None:
    """Cancelled by their clients, or at their deadline: no other request waits for them."""
    sets = ToolSets(8)
    grammars = [
        {"structured_outputs": {"json": calls_schema(sets.tools(100_000))}} for _ in range(6)
    ]
    clients = [Caller(server.grpc_url, server.http_url) for _ in grammars]

    def send(index: int) -> str:
        asked = {**ASK, "stream": True, "sampling_parameters": json.dumps(grammars[index])}
        try:
            found = clients[index].collect(**asked, timeout=10_000 if index % 2 else 60_000_000)
        except grpc.RpcError as error:
            return str(error.code())
        return str(found[-1]["finish_reason"][0])

    began = time.monotonic()
    with ThreadPoolExecutor(len(grammars)) as pool:
        ends = pool.map(send, range(len(grammars)))
        assert caller.one(text_input="Hello", max_tokens=4)["text_output"]
        for client in clients[::2]:
            client.close()
        assert set(list(ends)[1::2]) == {"abort"}
    assert ask(caller, {"guided_regex": "[ab]{4}"})
    assert time.monotonic() - began < 60
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"n": 2}, "[a-z]{8}[0-9]"),
        ({"stop": ["a", "e"]}, "[a-z]{0,8}[0-9]?"),
        ({"min_tokens": 30, "ignore_eos": True}, "[a-z]{8}[0-9]"),
        ({"prompt_logprobs": 1, "logprobs": 2}, "[a-z]{8}[0-9]"),
        ({"repetition_penalty": 1.5, "bad_words": ["a"], "return_sections": True}, ".{8}[0-9]"),
    ],
)
def test_with_other_fields(caller: Caller, fields: dict[str, Any], pattern: str) -> None:
    asked = {"structured_outputs": {"regex": "[a-z]{8}[0-9]"}, **fields}
    inputs = {**ASK, "sampling_parameters": json.dumps(asked)}
    response = caller.one(**inputs)
    assert all(re.fullmatch(pattern, text) for text in response["text_output"])
    assert set(response["finish_reason"]) == {"stop"}


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
