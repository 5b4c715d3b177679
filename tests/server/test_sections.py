"""Sections over the wire: streamed, whole, from each form of the request, and refused ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from client import TridentClient
from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tagged import tagged_tokenizer
from tests.factories.tokenizers import save_tokenizer
from tests.server.caller import Caller, InferError

pytestmark = pytest.mark.server

# Reasoning is between tokens of their own, special ones, and calls are between plain text.
REASONING, CALLS = ("<think>", "</think>"), ("<tool_call>", "</tool_call>")
MESSAGES = json.dumps([{"role": "user", "content": "What does <think> do?"}])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = tagged_tokenizer(REASONING, "special", opens="<think>\n")
    tokenizer.add_tokens(["<tool_", "</tool_", "call>"])  # so that a random model writes tags
    return tokenizer


@pytest.fixture(scope="module")
def server(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    folder = tmp_path_factory.mktemp("tagged")
    write_checkpoint(
        folder,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    settings = {
        "model": str(save_tokenizer(tokenizer, folder)),
        "dtype": "float32",
        "num_gpu_blocks_override": 200,
        "tool_call_parser": "hermes",
    }
    with TritonServer(settings, ports=0, start_timeout_s=120) as server:
        yield server


@pytest.fixture(scope="module")
def sampling(tokenizer: Any) -> dict[str, Any]:
    """Sampling that writes little but tags."""
    ids = {i for tag in (*REASONING, *CALLS) for i in tokenizer.encode(tag)}
    return {
        "temperature": 30.0,
        "seed": 3,
        "max_tokens": 400,
        "ignore_eos": True,
        "logit_bias": dict.fromkeys(tokenizer.encode("</tool_call>"), 40.0),
        "allowed_token_ids": sorted(ids | set(tokenizer.encode("a b"))),
    }


def joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sections: list[dict[str, Any]] = []
    for part in parts:
        if sections and sections[-1]["index"] == part["index"]:
            assert "tag" not in part
            sections[-1]["text"] += part["text"]
            sections[-1]["num_tokens"] += part.get("num_tokens", 0)
        else:
            sections.append({"num_tokens": 0, **part})
    return sections


def parts_of(responses: list[dict[str, list[Any]]]) -> list[dict[str, Any]]:
    return [part for response in responses for part in json.loads(response["sections"][0])]


def test_streamed_sections_are_those_of_the_whole_answer(
    caller: Caller, sampling: dict[str, Any]
) -> None:
    asked = {"messages": MESSAGES, "return_sections": True}
    asked["sampling_parameters"] = json.dumps(sampling)
    streamed = caller.collect(stream=True, **asked)
    whole = caller.one(**asked, return_num_output_tokens=True)
    sections = joined(json.loads(whole["sections"][0]))
    assert joined(parts_of(streamed)) == sections
    assert {section["type"] for section in sections} == {"content", "reasoning", "tool_call"}
    tags = [section["tag"] for section in sections[1:]]
    assert set(tags) == {*REASONING, *CALLS}
    # The template has opened the first one.
    assert sections[0]["type"] == "reasoning" or sections[0]["tag"] == "</think>"
    assert sum(section["num_tokens"] for section in sections) == whole["num_output_tokens"][0]
    # All text is in the sections or their tags; the special tokens are in no text.
    shown = "".join(section.get("tag", "") + section["text"] for section in sections)
    assert re.sub("|".join(REASONING), "", shown) == whole["text_output"][0]
    plain = caller.one(messages=MESSAGES, sampling_parameters=asked["sampling_parameters"])
    assert plain["text_output"] == whole["text_output"]
    assert "sections" not in plain


@pytest.mark.parametrize(
    ("begun", "kind"),
    [("", "reasoning"), ("a</think>", "content"), ("</think><tool_call>{", "tool_call")],
)
def test_an_answer_goes_on_in_the_section_that_its_prompt_leaves_open(
    caller: Caller, tokenizer: Any, begun: str, kind: str
) -> None:
    fields = {
        "return_sections": "true",
        "allowed_token_ids": tokenizer.encode("x"),
        "max_tokens": 3,
    }
    response = caller.one(
        text_input=f"What is <think>?<|assistant|><think>\n{begun}",
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(fields),
    )
    assert parts_of([response]) == [{"type": kind, "index": 0, "text": "xxx", "num_tokens": 3}]
    assert response["text_output"] == ["xxx"]


def test_our_client_joins_sections(server: TritonServer, sampling: dict[str, Any]) -> None:
    with TridentClient(server.grpc_url) as client:
        messages = json.loads(MESSAGES)
        answer = client.generate(messages=messages, n=2, return_sections=True, **sampling)
        for output in answer.outputs:
            assert output.sections is not None
            assert {section.type for section in output.sections} > {"content"}
            shown = "".join(section.tag + section.text for section in output.sections)
            assert re.sub("|".join(REASONING), "", shown) == output.text
        assert client.generate(messages=messages, **sampling).outputs[0].sections is None


@pytest.mark.parametrize("value", ["maybe", 3, [True], {}])
def test_a_wrong_value_is_refused(caller: Caller, value: Any) -> None:
    fields = json.dumps({"return_sections": value})
    with pytest.raises(InferError, match="return_sections: "):
        caller.one(text_input="Hi", sampling_parameters=fields)


def test_the_engine_alone_has_no_text(caller: Caller) -> None:
    fields = json.dumps({"return_sections": True})
    with pytest.raises(InferError, match="return_sections: needs detokenised output"):
        caller.one("engine", input_ids=[1, 2], sampling_parameters=fields)
