"""Whatever input of the tokenizer stage grows, the stage's time and memory grow no faster."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from engine.errors import RequestError, UnsupportedError
from engine.request.generation_defaults import GenerationDefaults
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import decode_parameters, queue_tenant
from engine.service.stages.preprocessor import Preprocessor
from engine.service.stages.request_inputs import parse_inputs
from engine.service.stages.tokenize import tokenize_tensors
from engine.service.stages.tokenized_request import engine_tensors
from engine.service.stages.tokenizer_queue import size_of
from engine.service.tensors import InputReader
from engine.text.grammar.request_formats import GUIDE, GUIDE_TYPE
from engine.text.tokenizer import Tokenizer
from tests.factories.costs import DIGITS, Cost, Schemas, assert_linear, cost_of
from tests.factories.tokenizers import (
    CHAT_TEMPLATE,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
)

MAX_MODEL_LEN = 2**20  # so that no prompt here is too long
LARGE_SIZE = 120_000
SIZES = pytest.mark.parametrize(
    "size",
    [
        pytest.param(2**15, marks=pytest.mark.slow),
        pytest.param(LARGE_SIZE, marks=pytest.mark.large),
    ],
)
DEFAULTS = GenerationDefaults((0,), 0, do_sample=False, sampling={})
Inputs = dict[str, Any]

TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "tools": (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ enable_thinking }}"
        "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or '' }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}{% endfor %}"
    ),
    "one by one": (
        "{% for t in tools or [] %}{% for name, p in t.function.parameters.properties.items() %}"
        "{{ name + p.type + p.description }}{% endfor %}{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for name, value in c.function.arguments.items() %}{{ name }}{{ value }}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "strict": (
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role == ns.last %}{{ raise_exception('alternate') }}{% endif %}"
        "{% set ns.last = m.role %}"
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}"
        "{% for c in m.tool_calls or [] %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ c | tojson }}"
        "{% endfor %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    ),
    "last system": (
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}"
        "{% endif %}{% endfor %}"
    ),
}


def _first(names: Iterable[str]) -> list[Any]:
    """Return parameters of which only the first is tested without `large`."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.large) for name in others)]


def preprocessor(kind: str = "byte_level", template: str = CHAT_TEMPLATE) -> Preprocessor:
    hf_tokenizer = byte_level_tokenizer() if kind == "byte_level" else byte_fallback_tokenizer()
    hf_tokenizer.chat_template = template
    tokenizer = Tokenizer(hf_tokenizer)
    return Preprocessor(
        tokenizer, DEFAULTS, max_model_len=MAX_MODEL_LEN, vocab_size=tokenizer.vocab_size
    )


def tensor(value: Any) -> np.ndarray[Any, Any]:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
        return np.array([[each.encode() for each in values]], dtype=object)
    return np.array([values], dtype=np.int32 if type(values[0]) is int else None)


def cost(preprocess: Preprocessor, inputs: Mapping[str, Any], parameters: str = "") -> Cost:
    """Return what the stage takes for a request, from its tensors to those of the engine."""
    tensors = {name: tensor(value) for name, value in inputs.items()}

    def work() -> None:
        with suppress(RequestError, UnsupportedError):
            given = decode_parameters(parameters)
            size_of(tensors)
            queue_tenant(InputReader(tensors), given, "a key of the server")
            if tokenize_tensors(tensors, preprocess) is None:
                engine_tensors(preprocess(parse_inputs(tensors, given), 0.0))

    return cost_of(work)


TEXTS: dict[str, Callable[[int], str]] = {
    "words": lambda n: "a word " * (n // 7),
    "one word": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "lines": lambda n: "\n" * n,
    "digits": lambda n: "1" * n,
    "emoji": lambda n: "🦊" * (n // 4),
    "accents": lambda n: "e\u0301" * (n // 3),
    "added tokens": lambda n: "é<|end|>" * (n // 9),
    "begun tokens": lambda n: "<|en" * (n // 4),
}
PROMPTS: dict[str, Callable[[str], Inputs]] = {
    "text_input": lambda text: {"text_input": text, "exclude_input_in_output": False},
    "tokenize": lambda text: {"tokenize": True, "text_input": text},
    "messages": lambda text: {"messages": json.dumps([{"role": "user", "content": text}])},
}


@SIZES
@pytest.mark.parametrize("prompt", _first(PROMPTS))
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", _first(["byte_level", "byte_fallback"]))
def test_stage_longer_text_cost_is_linear(kind: str, text: str, prompt: str, size: int) -> None:
    preprocess = preprocessor(kind)
    # One long word is merged in n log n, and beyond the processor's caches.
    assert_linear(
        lambda n: cost(preprocess, PROMPTS[prompt](TEXTS[text](n))), size, doublings=2, factor=3.2
    )


TOKENS: dict[str, Callable[[int], Inputs]] = {
    "input_ids": lambda n: {"input_ids": [5] * n, "exclude_input_in_output": False},
    "bytes": lambda n: {"input_ids": [200] * n, "exclude_input_in_output": False},
    "unknown": lambda n: {"input_ids": [10**6] * n},
    "cut": lambda n: {"input_ids": [5] * n, "sampling_parameters": '{"truncate_prompt_tokens": 9}'},
    "detokenize": lambda n: {"detokenize": True, "input_ids": [5] * n},
}


@SIZES
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("kind", _first(["byte_level", "byte_fallback"]))
def test_stage_more_tokens_cost_is_linear(kind: str, tokens: str, size: int) -> None:
    preprocess = preprocessor(kind)
    assert_linear(lambda n: cost(preprocess, TOKENS[tokens](n)), size // 4, doublings=2)


USER = {"role": "user", "content": "a"}


def call(number: int, arguments: str = "{}") -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}


def called(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation with `calls` in one turn, and their results."""
    results = [{"role": "tool", "tool_call_id": each["id"], "content": "3"} for each in calls]
    return [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results, USER]


# Of about n bytes, or some 4,000 messages in the largest.
MESSAGES: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "turns": lambda n: [USER, {"role": "assistant", "content": "b"}] * (n // 240),
    "turns of one role": lambda n: [USER] * (n // 120),
    "system first": lambda n: [{"role": "system", "content": "s"}, *[USER] * (n // 120)],
    "empty turns": lambda n: [{"role": "assistant", "content": None}] * (n // 120),
    "parts": lambda n: [{**USER, "content": [{"type": "text", "text": "a"}] * (n // 32)}],
    "calls": lambda n: called([call(i) for i in range(n // 128)]),
    "calls of one id": lambda n: called([call(0)] * (n // 128)),
    "broken calls": lambda n: called([call(i, '{"x": ') for i in range(n // 128)]),
    "turns of calls": lambda n: [each for i in range(n // 480) for each in called([call(i)])],
    "a broken call": lambda n: called([call(0, '{"x": "' + 'a\\n\\"\n' * (n // 6))]),
    "escapes of a broken call": lambda n: called([call(0, '"' * n)]),
    "backslashes of a broken call": lambda n: called([call(0, '{"x": "' + "\\" * (n - 1))]),
    "arguments": lambda n: called([call(0, json.dumps({f"x{i}": i for i in range(n // 16)}))]),
    "reasoning": lambda n: [
        USER,
        {"role": "assistant", "content": "b", "reasoning": "a" * n},
        USER,
    ],
    "members": lambda n: [{**USER, **{f"x{i}": None for i in range(n // 16)}}],
    "unknown members": lambda n: [{**USER, **{f"x{i}": 1 for i in range(n // 16)}}],
    "role": lambda n: [{"role": "r" * n, "content": "a"}],
    "marks": lambda n: [{**USER, "content": "trident0mark" * (n // 12)}],
    "others": lambda n: [
        {**USER, "provider_specific_fields": {f"x{i}": None for i in range(n // 16)}}
    ],
}


@SIZES
@pytest.mark.parametrize("messages", MESSAGES)
@pytest.mark.parametrize("template", _first(TEMPLATES))
def test_stage_larger_messages_cost_is_linear(template: str, messages: str, size: int) -> None:
    preprocess = preprocessor(template=TEMPLATES[template])

    def of_size(n: int) -> Cost:
        return cost(preprocess, {"messages": json.dumps(MESSAGES[messages](n))})

    assert_linear(of_size, size, doublings=2)


def tool(number: int, **parameters: Any) -> dict[str, Any]:
    properties = {"type": "object", "properties": parameters}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": properties}}


def _nested(depth: int) -> Any:
    return {"type": "object", "properties": {"a": _nested(depth - 1)}} if depth else {}


TYPED = {"type": "string", "description": "d"}
TOOLS: dict[str, Callable[[int], Inputs]] = {
    "tools": lambda n: {"tools": [tool(i) for i in range(n // 500)]},
    "wrong tools": lambda n: {"tools": [tool(i, x=TYPED) for i in range(n // 500)] + [tool(0)]},
    "tools that no template takes": lambda n: {
        "tools": [*(tool(i, x=TYPED) for i in range(n // 500)), tool(-1, x={"type": 3})]
    },
    "parameters": lambda n: {"tools": [tool(0, **{f"x{i}": TYPED for i in range(n // 64)})]},
    "nested": lambda n: {"tools": [tool(0, **{f"x{i}": _nested(9) for i in range(n // 400)})]},
    "types": lambda n: {"tools": [tool(0, x={"type": ["string"] * (n // 10)})]},
    "description": lambda n: {"tools": [tool(0, x={**TYPED, "description": "d" * n})]},
    "variables": lambda n: {"chat_template_kwargs": {f"x{i}": i for i in range(n // 16)}},
    "a variable": lambda n: {"chat_template_kwargs": {"enable_thinking": "a" * n}},
    "a name": lambda n: {"chat_template_kwargs": {"a" * n: 1}},
    "unknown": lambda n: {f"x{i}": i for i in range(n // 16)},
}


@SIZES
@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("template", _first(["tools", "one by one", "strict"]))
def test_stage_larger_chat_parameters_cost_is_linear(template: str, tools: str, size: int) -> None:
    preprocess = preprocessor(template=TEMPLATES[template])

    def of_size(n: int) -> Cost:
        inputs = {"messages": json.dumps([USER]), "chat_parameters": json.dumps(TOOLS[tools](n))}
        return cost(preprocess, inputs)

    assert_linear(of_size, size, doublings=2)


# Fields that are read before `SamplingParams` is made.
GRAMMARS: dict[str, Callable[[int], Any]] = {
    "guided_json": lambda n: {"properties": {f"x{i}": {} for i in range(n // 16)}},
    "guided_regex": lambda n: "a|" * (n // 2),
    "guided_choice": lambda n: ["a"] * (n // 5),
    "guided_grammar": lambda n: "start: /a/\n" * (n // 11),
    "guided_whitespace_pattern": lambda n: " " * n,
    "guided_decoding": lambda n: {"choice": ["a"] * (n // 5)},
    "response_format": lambda n: {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"enum": ["a"] * (n // 5)}},
    },
    "structured_outputs": lambda n: {"structural_tag": {"x": ["a"] * (n // 5)}},
    "cache_salt": lambda n: "a" * n,
    "tenant": lambda n: "a" * n,
    "tenant_key": lambda n: "a" * n,
}


def sampling_fields(size: int) -> Iterator[tuple[str, str]]:
    """Yield JSON of sampling parameters of about `size` bytes, and which field of them is large."""
    schema = SamplingParams.model_json_schema()
    schemas = Schemas(schema["$defs"])
    for name, field in schema["properties"].items():
        for path, value in schemas.grown(field, size):
            yield f"{name}{path}", json.dumps({name: value}).replace(f'"{DIGITS}"', "1" * size)
    for name, make in GRAMMARS.items():
        yield name, json.dumps({name: make(size)})
    yield "{}", json.dumps({f"x{i:07}": i for i in range(size // 16)})
    yield "{name}", json.dumps({"x" * size: 1})


@pytest.mark.large
@pytest.mark.parametrize("name", dict(sampling_fields(2**10)))
def test_stage_larger_sampling_field_cost_is_linear(name: str) -> None:
    preprocess, size = preprocessor(), LARGE_SIZE
    texts = {n: dict(sampling_fields(n))[name] for n in (size, 2 * size, 4 * size)}
    for of_request in (False, True):  # in the request parameters, or in the JSON object

        def of_size(n: int, of_request: bool = of_request) -> Cost:
            if of_request:
                return cost(preprocess, {"text_input": "a"}, texts[n])
            return cost(preprocess, {"text_input": "a", "sampling_parameters": texts[n]})

        assert_linear(of_size, size, doublings=2)


def many(name: str, count: int, size: int) -> Inputs:
    return {name: ["a" * max(1, size // count)] * count}


WORDS: dict[str, Callable[[int], Inputs]] = {
    **{
        f"{name}: {count}": lambda n, name=name, count=count: many(name, count, n)
        for name in ("stop_words", "bad_words", "sampling_param_stop", "embedding_bias_words")
        for count in (1, 256)
    },
    **{
        f"{name}: many": lambda n, name=name: {name: ["a"] * n}
        for name in ("stop_words", "bad_words", "sampling_param_stop", "embedding_bias_words")
    },
    "embedding_bias": lambda n: {
        "embedding_bias_words": ["a" * (n // 1024)] * 256,
        "embedding_bias_weights": [0.5] * 256,
    },
    "embedding_bias_weights": lambda n: {"embedding_bias_weights": [0.5] * n},
    **{
        f"{GUIDE_TYPE} {kind}": lambda n, kind=kind: {GUIDE_TYPE: kind, GUIDE: "a" * n}
        for kind in ("json_schema", "regex", "ebnf_grammar", "structural_tag", "json")
    },
    GUIDE_TYPE: lambda n: {GUIDE_TYPE: "a" * n},
    "image_url": lambda n: {"image_url": "a" * n},
    "max_tokens": lambda n: {"max_tokens": [1] * n},
}


@SIZES
@pytest.mark.parametrize("words", WORDS)
def test_stage_larger_tensor_cost_is_linear(words: str, size: int) -> None:
    preprocess = preprocessor()
    assert_linear(
        lambda n: cost(preprocess, {"text_input": "a", **WORDS[words](n)}), size, doublings=2
    )
