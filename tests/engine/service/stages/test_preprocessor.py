import json
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import RequestError
from engine.protocol.messages import Ready, ResponseOptions
from engine.request.generation_defaults import GenerationDefaults
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import queue_tenant
from engine.service.stages.preprocessor import Preprocessor
from engine.service.stages.request_inputs import parse_inputs
from engine.service.stages.tokenized_request import TokenizedRequest, engine_tensors
from engine.service.stub.engine_inputs import parse_engine_inputs
from engine.service.tensors import InputReader
from engine.text.tokenizer import Tokenizer
from tests.factories.tokenizers import byte_fallback_tokenizer, byte_level_tokenizer

READY = Ready(64, 330, 10, 16, 144, 64, "")
TOKENIZER = Tokenizer(byte_level_tokenizer())
DEFAULTS = GenerationDefaults((0,), 0, do_sample=False, sampling={"repetition_penalty": 1.25})
PREPROCESS = Preprocessor(TOKENIZER, DEFAULTS, max_model_len=64, vocab_size=500)


def tensor(value: Any) -> np.ndarray:
    values = value if isinstance(value, list) else [value]
    if isinstance(values[0], str):
        return np.array([[v.encode() for v in values]], dtype=object)
    array = np.array([values])
    return array.astype(np.int32) if array.dtype == np.int64 else array


def request(preprocess: Preprocessor = PREPROCESS, **inputs: Any) -> TokenizedRequest:
    if not {"messages", "input_ids"} & inputs.keys():
        inputs.setdefault("text_input", "hello")
    return preprocess(parse_inputs({name: tensor(v) for name, v in inputs.items()}, {}))


def chat(text: str) -> str:
    return json.dumps([{"role": "user", "content": text}])


def test_a_text_becomes_its_tokens_under_the_defaults_of_the_checkpoint() -> None:
    made = request()
    assert made.input_ids.dtype == np.int32
    assert made.input_ids.tolist() == TOKENIZER.encode("hello")
    assert made.sampling_params == SamplingParams(
        max_tokens=16, temperature=0.0, repetition_penalty=1.25
    )
    assert made.options == ResponseOptions(outputs=[], text_prefix="hello")


def test_messages_go_through_the_template_and_may_fill_the_context() -> None:
    made = request(messages=chat("hi"))
    assert TOKENIZER.decode(made.input_ids.tolist(), False) == "<|user|>hi<|end|><|assistant|>"
    assert made.sampling_params.max_tokens is None
    assert made.options.text_prefix == ""


def test_token_ids_are_taken_as_they_are_and_echoed_as_their_text() -> None:
    ids = TOKENIZER.encode("hello")
    made = request(input_ids=ids, exclude_input_in_output=False)
    assert made.input_ids.tolist() == ids
    assert made.sampling_params.max_tokens == 16
    assert made.options.text_prefix == "hello"
    assert request(input_ids=ids).options.text_prefix == ""
    with pytest.raises(RequestError, match=r"^input_ids\[0\]: token id 500 is outside the "):
        request(input_ids=[500])
    with pytest.raises(RequestError, match=r"^input_ids: the prompt has 64 tokens"):
        request(input_ids=[5] * 64)


def test_sections_are_asked_for_by_either_convention() -> None:
    asked = request(text_input="hello", return_sections=True)
    assert asked.sampling_params.return_sections
    assert asked.options.outputs == ["sections"]
    assert request(
        text_input="hello", sampling_parameters='{"return_sections": "1"}'
    ).options.outputs == ["sections"]
    overruled = request(
        text_input="hello", return_sections=True, sampling_parameters='{"return_sections": false}'
    )
    assert overruled.options.outputs == []


def test_deadlines_start_when_the_request_enters_the_tokenizer_stage() -> None:
    entered = time.monotonic() - 2.5
    made = PREPROCESS(parse_inputs({"text_input": tensor("hello")}, {}), entered)
    tensors = engine_tensors(made)
    assert parse_engine_inputs(tensors, {}, 0, READY).request.arrival_time == entered


@pytest.mark.parametrize(
    ("given", "counted"),
    [(None, 9000.0), (0.0, 9000.0), (5399.0, 9000.0), (9000.5, 9000.0), (5400.0, 5400.0)],
)
def test_an_arrival_time_that_cannot_be_is_replaced_by_now(
    monkeypatch: pytest.MonkeyPatch, given: float | None, counted: float
) -> None:
    clock = SimpleNamespace(monotonic=lambda: 9000.0)
    monkeypatch.setattr("engine.service.stub.engine_inputs.time", clock)
    options = msgspec.msgpack.encode(ResponseOptions(arrival_time=given))
    tensors = {
        "input_ids": np.array([5]),
        "response_options": np.frombuffer(options, dtype=np.uint8),
    }
    assert parse_engine_inputs(tensors, {}, 0, READY).request.arrival_time == counted


def test_a_template_writes_the_special_tokens_itself() -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer())
    preprocess = Preprocessor(tokenizer, DEFAULTS, max_model_len=500, vocab_size=500)
    rendered = "<|user|>hi<|end|><|assistant|>"
    expected = tokenizer.encode(rendered, add_special_tokens=False)
    assert request(preprocess, messages=chat("hi")).input_ids.tolist() == expected
    assert request(preprocess, text_input="hi").input_ids.tolist() == tokenizer.encode("hi")


@pytest.mark.parametrize(
    ("inputs", "prefix"),
    [
        ({}, "hello"),
        ({"stream": True}, ""),
        ({"stream": True, "exclude_input_in_output": False}, "hello"),
        ({"exclude_input_in_output": True}, ""),
    ],
)
def test_when_the_prompt_is_given_back(inputs: dict[str, Any], prefix: str) -> None:
    assert request(**inputs).options.text_prefix == prefix


def test_a_default_max_tokens_gives_way_to_a_long_prompt() -> None:
    made = request(text_input="~" * 60)
    assert (len(made.input_ids), made.sampling_params.max_tokens) == (60, 4)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"text_input": "~" * 64}, "text_input: the prompt has 64 tokens; max_model_len is 64"),
        (
            {"text_input": "~" * 60, "max_tokens": 5},
            r"max_tokens: 5 and the 60 tokens of text_input exceed max_model_len \(64\)",
        ),
        ({"messages": chat("~" * 64)}, "messages: the prompt has 67 tokens"),
        ({"messages": "[]"}, "messages: must not be empty"),
        ({"messages": "{"}, "messages: is not valid JSON"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1"),
        ({"temperature": float("nan")}, "temperature: .* finite"),
        ({"temperature": -0.5}, "temperature: .* greater than or equal to 0"),
        ({"top_p": 1.5}, "top_p: .* less than or equal to 1"),
        ({"num_return_sequences": 0}, "num_return_sequences: .* greater than or equal to 1"),
        ({"sampling_parameters": '{"top_p": 0}'}, "top_p: .* greater than 0"),
        ({"sampling_parameters": '{"max_tokens": "many"}'}, "max_tokens: .* valid integer"),
        ({"sampling_parameters": '{"bogus": 1}'}, "bogus: unknown field"),
        ({"sampling_parameters": '{"stop": [1]}'}, r"stop\[0\]: .* valid string"),
    ],
)
def test_bad_requests_name_the_input_and_the_limit(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        request(**inputs)


def test_all_beams_are_returned_unless_the_client_says_how_many() -> None:
    def n(**inputs: Any) -> int:
        return request(**inputs).sampling_params.n

    assert n(beam_width=1, length_penalty=1.0) == 1
    assert n(beam_width=4) == 4
    assert n(beam_width=4, num_return_sequences=1) == 1
    assert n(beam_width=4, sampling_parameters='{"n": 2}') == 2
    assert n(sampling_parameters='{"beam_width": 4}') == 1


def test_a_megabyte_is_refused_without_tokenising_it() -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match=r"^text_input: the prompt of 1000000 characters cannot"):
        request(text_input="word " * 200_000)
    with pytest.raises(RequestError, match=r"^messages: has 1000033 characters; at most"):
        request(messages=chat("word " * 200_000))
    assert time.monotonic() - start < 1.0


def test_end_id_takes_the_place_of_the_end_of_sequence() -> None:
    params = request(end_id=7, sampling_parameters='{"stop_token_ids": [9]}').sampling_params
    assert (params.ignore_eos, params.stop_token_ids) == (True, (9, 7))
    params = request(end_id=-1).sampling_params
    assert (params.ignore_eos, params.stop_token_ids) == (True, ())


def test_embedding_bias_goes_to_the_tokens_of_each_word() -> None:
    made = request(
        embedding_bias_words=["~", "~a"],
        embedding_bias_weights=[1.0, 2.0],
        sampling_parameters='{"logit_bias": {"5": 0.5}}',
    )
    (tilde,), (_, a) = (TOKENIZER.encode(word) for word in ("~", "~a"))
    assert made.sampling_params.logit_bias == {5: 0.5, tilde: 3.0, a: 2.0}


def test_embedding_bias_is_limited_as_logit_bias_is() -> None:
    made = request(embedding_bias_words=["~", "~"], embedding_bias_weights=[-90.0, -80.0])
    assert made.sampling_params.logit_bias == {TOKENIZER.encode("~")[0]: -100.0}
    with pytest.raises(
        RequestError, match=r"^embedding_bias_weights: must be -100 to 100 \(got 101"
    ):
        request(embedding_bias_words=["~"], embedding_bias_weights=[101.0])


def test_the_engine_reads_what_the_tokenizer_stage_writes() -> None:
    made = request(
        num_return_sequences=2,
        stream=True,
        exclude_input_in_output=False,
        return_finish_reason=True,
        stop_words=["停", "stop"],
        sampling_parameters='{"logit_bias": {"5": -1.5}, "max_tokens": null, "cache_salt": "é", '
        '"tenant": "t", "tenant_key": "a key of 16 and more"}',
        seed=np.uint64(3),
        priority=-2,
        timeout=np.uint64(2_500_000),
    )
    inputs = parse_engine_inputs(
        engine_tensors(made), {}, 0, READY, tenant_key="a key of 16 and more"
    )
    assert inputs.request.prompt_token_ids.tolist() == made.input_ids.tolist()
    assert SamplingParams.parse(inputs.request.sampling_params) == made.sampling_params
    assert inputs.request.num_sequences == 2
    assert inputs.request.stream
    assert (inputs.request.priority, inputs.request.timeout_s) == (-2, 2.5)
    assert inputs.request.text_prefix == "hello"
    message = inputs.request.message(1)
    assert (message.cache_salt, message.tenant) == ("é", "t")
    assert inputs.options == ResponseOptions(["finish_reason", "sequence_index"], "hello")


KEY = "a-key-of-16-or-more-characters"


@pytest.mark.parametrize(
    ("fields", "tenant_key", "expected"),
    [
        ({"tenant": "t"}, None, ""),  # any client may name as many as it likes
        ({"tenant": "t"}, KEY, ""),
        ({"tenant": "t", "tenant_key": KEY}, KEY, "t"),
        ({"tenant_key": KEY}, KEY, ""),
        ({}, KEY, ""),
    ],
)
def test_tenants_without_the_servers_key_count_as_one(
    fields: dict[str, str], tenant_key: str | None, expected: str
) -> None:
    ids = np.array([[1, 2, 3]], dtype=np.int32)
    inputs = parse_engine_inputs({"input_ids": ids}, fields, 0, READY, tenant_key=tenant_key)
    assert inputs.request.tenant == expected
    as_json = InputReader({"sampling_parameters": tensor(json.dumps({**fields, "n": 2}))})
    assert queue_tenant(as_json, {}, tenant_key) == expected
    assert queue_tenant(InputReader({}), fields, tenant_key) == expected


@pytest.mark.parametrize(
    ("tenant_key", "message"),
    [(None, r"^tenant_key: the server has no"), (KEY + "x", r"^tenant_key: does not match the")],
)
def test_wrong_tenant_key_is_refused(tenant_key: str | None, message: str) -> None:
    fields = {"input_ids": np.array([[1]], dtype=np.int32)}
    with pytest.raises(RequestError, match=message):
        parse_engine_inputs(fields, {"tenant_key": KEY}, 0, READY, tenant_key=tenant_key)


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 10**5, '{"tenant": 1}', '{"tenant_key": "\\ud800"}']
)
def test_queue_tenant_of_a_wrong_request_is_none(text: str) -> None:
    inputs = InputReader({"sampling_parameters": tensor(text)})
    assert queue_tenant(inputs, {}, KEY) == ""
    assert queue_tenant(InputReader({}), {"tenant": 1, "tenant_key": KEY}, KEY) == ""


def test_request_parameters_do_not_count_twice() -> None:
    tensors = {"text_input": tensor("hi"), "sampling_parameters": tensor('{"top_k": 0}')}
    parameters = {"top_k": 5, "min_p": 0.5}
    made = PREPROCESS(parse_inputs(tensors, parameters))
    inputs = parse_engine_inputs(engine_tensors(made), parameters, 0, READY)
    params = SamplingParams.parse(inputs.request.sampling_params)
    assert params == made.sampling_params
    assert (params.top_k, params.min_p) == (0, 0.5)


def test_a_client_may_call_the_engine_itself() -> None:
    ids = np.array([[1, 2, 3]], dtype=np.int32)
    parameters = {"max_tokens": 5, "cache_salt": "mine"}
    inputs = parse_engine_inputs({"input_ids": ids}, parameters, 0, READY)
    assert inputs.request.cache_salt == "mine"
    assert inputs.options is None
    assert inputs.request.sampling_params == {"max_tokens": 5}
    assert inputs.request.timeout_s is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"input_ids": [1] * 64}, "input_ids: the prompt has 64 tokens; max_model_len is 64"),
        (
            {"input_ids": [1] * 63, "sampling_parameters": '{"max_tokens": 2}'},
            "max_tokens: 2 and the 63 tokens of input_ids exceed",
        ),
        (
            {"input_ids": [1], "sampling_parameters": '{"cache_salt": []}'},
            "cache_salt: must be a non-empty string",
        ),
        ({"input_ids": [1], "sampling_parameters": '{"n": 0}'}, "n: .* greater than or equal"),
        (
            {"input_ids": [1], "response_options": [255]},
            "response_options: is set by the tokenizer",
        ),
        ({"input_ids": 0.5}, "input_ids: must be of type integer"),
    ],
)
def test_the_engine_checks_again(tensors: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        parse_engine_inputs({name: tensor(v) for name, v in tensors.items()}, {}, 0, READY)


def test_the_options_are_msgpack() -> None:
    options = engine_tensors(request(return_log_probs=True))["response_options"]
    assert options.dtype == np.uint8
    decoded = msgspec.msgpack.decode(options.tobytes(), type=ResponseOptions)
    assert decoded.outputs == ["cum_log_probs", "output_log_probs"]
