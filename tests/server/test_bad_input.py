"""Requests that are wrong: each is answered with what is wrong, and nothing else happens."""

import json
import re
import threading
from typing import Any

import pytest

from tests.server.caller import Caller, InferError

pytestmark = pytest.mark.server


def sampling(**fields: object) -> dict[str, str]:
    return {"sampling_parameters": json.dumps(fields)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text_input": ""}, "text_input: must not be empty"),
    ({}, "text_input: is missing"),
    ({"text_input": b"\xff\xfe"}, "text_input: is not valid UTF-8"),
    ({"text_input": b"\xed\xa0\x80"}, "text_input: is not valid UTF-8"),
    ({"text_input": "~" * 600}, "text_input: the prompt has 600 tokens; max_model_len is 512"),
    ({"text_input": "x" * 2**20}, "text_input: the prompt of 1048576 characters cannot fit"),
    ({"max_tokens": 600}, "exceed max_model_len (512)"),
    ({"max_tokens": 0}, "max_tokens: must be at least 1 without prompt_logprobs"),
    ({"max_tokens": -5}, "max_tokens: Input should be greater than or equal to 0"),
    ({"temperature": -1.0}, "temperature: Input should be greater than or equal to 0"),
    ({"temperature": float("nan")}, "temperature: Input should be a finite number"),
    ({"top_p": 1.5}, "top_p: Input should be less than or equal to 1"),
    ({"top_k": -2}, "top_k: Input should be greater than or equal to 0"),
    ({"num_return_sequences": 0}, "num_return_sequences: Input should be greater"),
    ({"beam_width": 65}, "beam_width: Input should be less than or equal to 64"),
    (
        {"beam_width": 2, "num_return_sequences": 3},
        "num_return_sequences: must not exceed beam_width (3 > 2)",
    ),
    ({"beam_width": 2, "stop_words": ["a"]}, "stop_words: is not supported with beam_width"),
    (
        {"beam_width": 2, "guided_decoding_guide_type": "json"},
        "structured_outputs: is not supported with beam_width",
    ),
    ({"beam_width": 2, "length_penalty": 11.0}, "length_penalty: Input should be less than"),
    (sampling(beam_width=2, early_stopping="soon"), "early_stopping"),
    (sampling(best_of=2, n=3), "best_of: must be at least n (2 < 3)"),
    ({"guided_decoding_guide_type": "xml"}, "guided_decoding_guide_type: must be json"),
    (
        {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(?=a)b"},
        "guided_decoding_guide: at 1(8): invalid regex",
    ),
    ({"lora_task_id": 1}, "lora_task_id: not supported"),
    ({"end_id": 100_000}, "end_id: token id 100000 is outside the vocabulary"),
    ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: must have one weight per word"),
    ({"stop_words": [b"\xff"]}, "stop_words: is not valid UTF-8"),
    ({"text_input": ["a", "b"]}, "unexpected shape for input 'text_input'"),
    ({"timeout": 0}, "timeout: must be at least 1"),
    ({"sampling_parameters": "{nonsense"}, "sampling_parameters: is not valid JSON"),
    ({"sampling_parameters": "[]"}, "sampling_parameters: must be a JSON object"),
    (sampling(bogus=1), "bogus: unknown field"),
    (sampling(max_tokens="many"), "max_tokens: Input should be a valid integer"),
    (
        sampling(logprobs=1000),
        "logprobs: must be at most the server's setting max_logprobs, 20 (got 1000)",
    ),
    (sampling(allowed_token_ids=[99999]), "allowed_token_ids[0]: token id 99999 is outside"),
    ({"parameters": {"bogus": 1}}, "bogus: unknown field"),
    ({"text_input": None, "messages": "{"}, "messages: is not valid JSON"),
    ({"text_input": None, "messages": "[]"}, "messages: must not be empty"),
    ({"text_input": None, "messages": '[{"role": "user"}]'}, "messages[0].content: is missing"),
    ({"messages": "[]"}, "text_input, messages: give only one prompt"),
]


@pytest.mark.parametrize(("inputs", "message"), BAD)
def test_it_is_named(caller: Caller, inputs: dict[str, Any], message: str) -> None:
    merged = {"text_input": "hi", **inputs} if inputs else {"max_tokens": 1}
    given = {name: value for name, value in merged.items() if value is not None}
    with pytest.raises(InferError) as caught:
        caller.collect(**given)
    assert message in str(caught.value)
    for leak in ("Traceback", "/", "internal"):
        assert leak not in str(caught.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": [5, 999_999]}, "input_ids[1]: token id 999999 is outside the vocabulary"),
        ({"input_ids": [-1]}, "input_ids[0]: token id -1 is outside the vocabulary"),
        ({"input_ids": [1] * 512}, "input_ids: the prompt has 512 tokens; max_model_len is 512"),
        (
            {"input_ids": [1], "response_options": [193]},
            "response_options: is set by the tokenizer",
        ),
        ({"input_ids": [1], **sampling(n=0)}, "n: Input should be greater than or equal to 1"),
    ],
)
def test_it_is_named_by_the_engine(caller: Caller, inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match="^" + re.escape(message)):
        caller.collect("engine", **inputs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": "hi", "bogus": 1}, "bogus: unknown field"),
        ({"text_input": "hi", "max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"text_input": "x" * 2**20, "max_tokens": 1}, "cannot fit into max_model_len"),
        (b'{"text_input": "\xff", "max_tokens": 1}', "text_input: is not valid UTF-8"),
        (b'{"text_input": "hi", "bo\xffgus": 1}', "parameters are not valid UTF-8"),
    ],
)
def test_it_is_a_400_over_http(caller: Caller, body: Any, message: str) -> None:
    status, answer = caller.generate(body)
    assert status == 400
    assert message in answer["error"]


@pytest.mark.parametrize(
    "body", [b"{", b'{"text_input": "\\ud800"}', b'{"text_input": "hi", "max_tokens": "x"}']
)
def test_triton_refuses_what_it_cannot_read(caller: Caller, body: bytes) -> None:
    status, answer = caller.generate(body)
    assert status >= 400
    assert "JSON" in answer["error"]


def test_others_go_on_meanwhile(caller: Caller) -> None:
    inputs = {"text_input": "Hello", "max_tokens": 150, **sampling(ignore_eos=True)}
    alone = caller.text(**inputs)
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(caller.text(**inputs)))
    thread.start()
    for bad in ({"max_tokens": 0}, {"temperature": -1.0}, {"end_id": 100_000}) * 5:
        with pytest.raises(InferError):
            caller.collect(text_input="hi", **bad)
    thread.join()
    assert answers == [alone]
