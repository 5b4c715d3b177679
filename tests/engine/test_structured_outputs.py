"""Structured output of a model with random weights."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from engine import LLM, SamplingParams
from engine.bench.tool_sets import ToolSets, calls_schema
from engine.errors import RequestError
from engine.text.tokenizer import Tokenizer
from tests.factories.json_schemas import FAMILIES, SCHEMAS
from tests.factories.tokenizers import byte_level_tokenizer

# Ends strings, arrays and objects sooner than random weights do.
_CLOSING = '"}],:'
_A = Tokenizer(byte_level_tokenizer()).encode("a")[0]


@pytest.fixture(scope="module", params=[False, True], ids=["step-by-step", "one-step-ahead"])
def ahead(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def llm(checkpoint: Path, ahead: bool) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 16}
    # Too few blocks for 16 long sequences: some are preempted.
    settings |= {"num_gpu_blocks_override": 600, "async_scheduling": ahead}
    return LLM(str(checkpoint), **settings)


@pytest.fixture(autouse=True)
def _nothing_leaks(llm: LLM) -> Iterator[None]:
    yield
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def params(**fields: Any) -> SamplingParams:
    tokenizer = Tokenizer(byte_level_tokenizer())
    bias = {tokenizer.encode(each, add_special_tokens=False)[0]: 4.0 for each in _CLOSING}
    bias |= {tokenizer.encode(each, add_special_tokens=False)[0]: -4.0 for each in " \n\r\t"}
    settings = {"temperature": 1.5, "max_tokens": 300, "seed": 7, "logit_bias": bias}
    return SamplingParams.parse({**settings, **fields})


def answers(llm: LLM, *many: SamplingParams) -> list[tuple[str, str, list[int]]]:
    """Return text, finish reason and tokens of each sequence."""
    results = llm.generate([[5, 6, 7]] * len(many), many, use_tqdm=False)
    return [(o.text, o.finish_reason, o.token_ids) for result in results for o in result.outputs]


@pytest.mark.slow
def test_finished_documents_of_three_hundred_schemas_are_valid(llm: LLM, ahead: bool) -> None:
    # The tokenizer has a token whose text is "é" and whose byte is another: it cannot be forced.
    schemas = [each for each in SCHEMAS if "é" not in json.dumps(each, ensure_ascii=False)]
    schemas = schemas[ahead::2]  # either way of stepping takes half
    found = answers(llm, *(params(structured_outputs={"json": schema}) for schema in schemas))
    finished = [
        (schema, text)
        for schema, (text, reason, _) in zip(schemas, found, strict=True)
        if reason == "stop"
    ]
    for schema, text in finished:
        Draft202012Validator(schema).validate(json.loads(text))
    assert len(finished) > 120


@pytest.mark.slow
def test_finished_calls_of_a_tool_set_of_100_kb_are_valid(llm: LLM) -> None:
    tools = ToolSets(2).tools(100_000)
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    asked = {"json": calls_schema(tools)}
    many = [params(structured_outputs=asked, max_tokens=900, seed=seed) for seed in range(24)]
    calls = [json.loads(text) for text, reason, _ in answers(llm, *many) if reason == "stop"]
    for call in calls:
        Draft202012Validator(
            parameters[call["name"]], format_checker=Draft202012Validator.FORMAT_CHECKER
        ).validate(call["arguments"])
    assert len(calls) >= 12
    assert len({call["name"] for call in calls}) > 3


def test_requests_with_and_without_grammars_share_steps(llm: LLM) -> None:
    plain = params(max_tokens=20, ignore_eos=True)
    alone = answers(llm, plain)
    schemas = FAMILIES["tools"][:10]
    many = [params(structured_outputs={"json": schema}) for schema in schemas]
    found = answers(llm, plain, *many, params(structured_outputs={"regex": r"\d{3}-\d{4}"}))
    assert found[0] == alone[0]
    for schema, (text, reason, _) in zip(schemas, found[1:-1], strict=True):
        if reason == "stop":
            Draft202012Validator(schema).validate(json.loads(text))
    assert re.fullmatch(r"\d{3}-\d{4}", found[-1][0])
    assert found[-1][1] == "stop"


def test_the_samples_of_a_request_each_follow_the_grammar(llm: LLM) -> None:
    found = answers(llm, params(n=8, structured_outputs={"choice": ["left", "right", "up"]}))
    assert {text for text, _, _ in found} <= {"left", "right", "up"}
    assert {reason for _, reason, _ in found} == {"stop"}
    assert len({text for text, _, _ in found}) > 1


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[ab]{5}"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"grammar": 'root ::= "x" [0-9]{3}'}},
        {
            "structured_outputs": {"json": {"type": "integer"}, "begin_after": ","},
            "max_tokens": 2000,
        },
        {"structured_outputs": {"regex": "[a-z]+"}, "ignore_eos": True},
        {"structured_outputs": {"regex": "[a-z]+"}, "stop": ["ab"]},
        {"structured_outputs": {"regex": "[a-z]{9}"}, "min_tokens": 50},
        {"structured_outputs": {"regex": "[ab]{6}"}, "bad_words": ["a"]},
        {"structured_outputs": {"regex": "[a-c]{6}"}, "allowed_token_ids": [_A]},
        {"structured_outputs": {"regex": "[a-z]{4}"}, "logprobs": 2, "presence_penalty": 1.0},
    ],
)
def test_with_other_fields(llm: LLM, fields: dict[str, Any]) -> None:
    [(text, reason, token_ids)] = answers(llm, params(**fields))
    assert reason == "stop"
    assert text or "stop" in fields
    assert 0 not in token_ids[:-1]  # the end-of-sequence token


def test_a_cut_off_document_says_so(llm: LLM) -> None:
    [(text, reason, token_ids)] = answers(
        llm, params(structured_outputs={"regex": "[a-z]{40}"}, max_tokens=5)
    )
    assert (reason, len(token_ids)) == ("length", 5)
    assert re.fullmatch("[a-z]{5,39}", text)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex: .*look-around"),
        ({"guided_json": {"not": {}}}, 'guided_json: #: keyword "not" is not enforced'),
        (
            {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [5]},
            "the grammar cannot be followed: no token is left",
        ),
    ],
)
def test_what_cannot_be_followed_fails_alone(llm: LLM, fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(RequestError, match=fault):
        answers(llm, params(**fields))
    assert answers(llm, params(structured_outputs={"regex": "ab"}))[0][0] == "ab"
