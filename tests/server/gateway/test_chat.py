"""`/v1/chat/completions` with OpenAI's own clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from client import TridentClient
from engine.launch.server import TritonServer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.gateway.conftest import MODEL, Blocking, Direct

pytestmark = pytest.mark.server

TOKENIZER = byte_level_tokenizer()
USER = {"role": "user", "content": "One two"}
RENDERED = "<|user|>One two<|end|><|assistant|>"
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 12}


def create(client: Direct | Blocking, **options: Any) -> Any:
    return client.create("chat.completions", **{**GREEDY, "messages": [USER], **options})


def joined(chunks: list[Any]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts


@pytest.fixture(scope="module")
def direct(server: TritonServer) -> Any:
    with TridentClient(server.grpc_url) as client:
        yield lambda **options: client.generate(
            messages=[USER], **{"temperature": 0, "max_tokens": 12, **options}
        )


def test_an_answer_is_the_servers(client: Direct | Blocking, direct: Any) -> None:
    expected = direct()
    answer = create(
        client, n=2, user="me", prompt_cache_key="a", safety_identifier="b", store=False
    )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert choice.message.content == expected.text
        assert choice.finish_reason == expected.finish_reason
        assert choice.message.tool_calls is None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(RENDERED))
    assert answer.usage.completion_tokens == 2 * expected.num_output_tokens


def test_a_stream_is_the_same_answer(client: Direct | Blocking, direct: Any) -> None:
    expected = direct(max_tokens=40)
    asked: Any = {"max_completion_tokens": 40, "max_tokens": 40}
    *chunks, last = create(client, stream=True, stream_options={"include_usage": True}, **asked)
    assert joined(chunks) == {0: expected.text}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == expected.finish_reason
    assert (last.choices, last.usage.completion_tokens) == ([], expected.num_output_tokens)


def test_an_answer_may_fill_the_context(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == MAX_MODEL_LEN
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: Direct | Blocking, direct: Any, stream: bool) -> None:
    expected = direct(logprobs=3)
    answer = create(client, logprobs=True, top_logprobs=3, stream=stream)
    found = [
        position
        for each in (answer if stream else [answer])
        for choice in each.choices
        if choice.logprobs is not None
        for position in choice.logprobs.content
    ]
    for position, own in zip(found, expected.outputs[0].logprobs, strict=True):
        assert (position.token, position.logprob) == (own.chosen.token, own.chosen.logprob)
        told = own.chosen.raw or own.chosen.token.encode()
        assert position.bytes == list(told)
        assert told.decode("utf-8", "replace") == position.token
        assert [each.logprob for each in position.top_logprobs] == [
            each.logprob for each in own.top[:3]
        ]
    plain = create(client, logprobs=True)
    assert all(not position.top_logprobs for position in plain.choices[0].logprobs.content)


def test_content_in_its_forms(openai: OpenAI) -> None:
    def length(*messages: Any) -> int:
        answer = openai.chat.completions.create(messages=list(messages), **GREEDY)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    parts = {"role": "user", "content": [{"type": "text", "text": "One two"}]}
    assert length(USER) == length(parts)
    system = {"role": "system", "content": "Be brief."}
    assert length(system, USER) > length(USER)
    litellms = {"role": "assistant", "content": "x", "provider_specific_fields": {"refusal": None}}
    assert length(USER, litellms) == length(USER, {"role": "assistant", "content": "x"})
    # As an answer is sent back.
    answer = openai.chat.completions.create(messages=[USER], **GREEDY)  # type: ignore[list-item]
    assert length(USER, answer.choices[0].message.model_dump(), USER) > length(USER)


def test_structured_output_and_extensions(openai: OpenAI) -> None:
    def text(messages: Any = (USER,), **extensions: Any) -> str:
        made = openai.chat.completions.create(
            messages=list(messages), extra_body=extensions, **{**GREEDY, "max_tokens": 60}
        )
        return made.choices[0].message.content or ""

    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    blanks = {str(token_id): -100 for token_id in TOKENIZER.encode("\n\t\r ")}
    assert json.loads(text(response_format=form, logit_bias=blanks))["a"] in (1, 2)
    assert text(structured_outputs={"regex": "[0-9]{4}"}).isdigit()
    begun = [USER, {"role": "assistant", "content": "Once upon"}]
    assert text(begun, continue_final_message=True) != text(begun)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"unheard_of": 1}, "unheard_of", "unknown field"),
    ({"messages": []}, "messages", "messages: must not be empty"),
    ({"messages": "hi"}, "messages", "messages: "),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"messages": [USER, {**USER, "x": 1}]}, "messages[1].x", "unknown field"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "only text parts are supported",
    ),
    ({"messages": [{"role": "banned", "content": "x"}]}, "messages", "No banned role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x",
        "unknown field",
    ),
    ({"messages": [USER, {**USER, "a\n-": 1}]}, r'messages[1]["a\n-"]', "unknown field"),
    (
        {"messages": [{**USER, "provider_specific_fields": {"x": 1}}]},
        "messages[0].x",
        "unknown field",
    ),
    ({"messages": [{**USER, "reasoning": 1}]}, "messages[0].reasoning", "must be a string"),
    ({"stop": ["a", "b" * 2000]}, "stop[1]", "at most 1024"),
    ({"logit_bias": {"a: b": 1}}, 'logit_bias["a: b"]', "valid integer"),
    ({"n": 10**9}, "n", "n: "),
    ({"top_logprobs": 2}, "top_logprobs", "only if logprobs is true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be 0 to 20"),
    ({"logprobs": 2}, "logprobs", "logprobs: "),
    ({"max_completion_tokens": 5}, "max_tokens", "give only one of them"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    (
        {"max_tokens": None, "max_completion_tokens": 600},
        "max_completion_tokens",
        "max_completion_tokens: 600 and the ",
    ),
    ({"store": True}, "store", "store: "),
    ({"modalities": ["audio"]}, "modalities[0]", "modalities[0]: "),
    ({"reasoning_effort": "low"}, "reasoning_effort", "only none with this model"),
    (
        {"chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs.enable_thinking",
        "not supported by this model",
    ),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "the server's is used"),
    (
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
        "cannot be true together with",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_is_wrong_is_refused_by_name(
    openai: OpenAI, fields: dict[str, Any], param: str, text: str, stream: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(
            messages=[USER],
            stream=stream,
            extra_body=fields,
            **GREEDY,  # type: ignore[list-item]
        )
    assert text in caught.value.message
    assert caught.value.param == param


def test_a_chat_that_is_too_long_is_told_both_numbers(openai: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x" * 600}]
        )
    assert f"max_model_len is {MAX_MODEL_LEN}" in caught.value.message
    assert "messages: the prompt has " in caught.value.message
    assert caught.value.code == "context_length_exceeded"
