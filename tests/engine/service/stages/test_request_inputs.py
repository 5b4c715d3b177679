import contextlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from engine.errors import RequestError, UnsupportedError
from engine.request.sampling_params import SamplingParams
from engine.service.parameters import Tenant
from engine.service.sampling_inputs import REFUSED, renamed
from engine.service.stages.request_inputs import RequestInputs, parse_inputs


def text(*values: str | bytes, batched: bool = True) -> np.ndarray:
    data = [v.encode() if isinstance(v, str) else v for v in values]
    return np.array([data] if batched else data, dtype=object)


def i32(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.int32)


def f32(*values: float) -> np.ndarray:
    return np.array([values], dtype=np.float32)


def flag(value: bool) -> np.ndarray:
    return np.array([[value]])


def u64(value: int) -> np.ndarray:
    return np.array([[value]], dtype=np.uint64)


def parse(
    parameters: dict[str, Any] | None = None, timeout_us: int = 0, **tensors: np.ndarray
) -> RequestInputs:
    tensors.setdefault("text_input", text("hello"))
    return parse_inputs(tensors, parameters or {}, timeout_us)


def test_tensors_of_the_tensorrt_llm_convention() -> None:
    inputs = parse(
        max_tokens=i32(7),
        num_return_sequences=i32(2),
        beam_width=i32(1),
        temperature=f32(0.5),
        top_k=i32(0),
        top_p=f32(0.0),
        min_length=i32(3),
        random_seed=u64(2**64 - 1),
        stop_words=text("", "stop", "停"),
        bad_words=text(""),
        end_id=i32(-1),
        pad_id=i32(0),
        stream=flag(True),
        exclude_input_in_output=flag(False),
        priority=i32(-3),
        timeout=u64(1_000_000),
    )
    assert inputs.fields == {
        "max_tokens": 7,
        "n": 2,
        "beam_width": 1,
        "temperature": 0.5,
        "top_k": 0,
        "min_tokens": 3,
        "seed": 2**64 - 1,
        "stop": ["stop", "停"],
        "bad_words": [],
    }
    assert inputs.stream
    assert inputs.exclude_input_in_output is False
    assert (inputs.end_id, inputs.priority, inputs.timeout_us) == (-1, -3, 1_000_000)


def test_the_json_object_wins_over_parameters_and_those_over_tensors() -> None:
    inputs = parse(
        {"max_tokens": 2, "top_k": 2, "triton_enable_empty_final_response": True, "timeout": 5},
        max_tokens=i32(1),
        top_k=i32(1),
        temperature=f32(1.5),
        min_p=f32(0.25),
        sampling_parameters=text('{"max_tokens": "3", "temperature": null}'),
    )
    assert inputs.fields == {"max_tokens": "3", "top_k": 2, "min_p": 0.25}


def test_cache_salt_and_tenant_are_no_sampling_parameters() -> None:
    as_json = parse({"cache_salt": "b"}, sampling_parameters=text('{"cache_salt": "a", "n": 2}'))
    assert (as_json.cache_salt, as_json.fields) == ("a", {"n": 2})
    assert parse({"cache_salt": "b"}).cache_salt == "b"
    assert parse(sampling_parameters=text('{"cache_salt": null}')).cache_salt == ""
    by_tenant = parse({"tenant": "b"}, sampling_parameters=text('{"tenant": "a", "n": 2}'))
    assert (by_tenant.tenant, by_tenant.fields) == (Tenant("a"), {"n": 2})
    with_key = parse({"tenant_key": "k"}, sampling_parameters=text('{"tenant": "a"}'))
    assert (with_key.tenant, with_key.fields) == (Tenant("a", "k"), {})


def test_canonical_names_win_over_aliases() -> None:
    inputs = parse(min_tokens=i32(1), min_length=i32(2), seed=u64(3), random_seed=u64(4))
    assert inputs.fields == {"min_tokens": 1, "seed": 3}


def test_no_limit_is_a_value_of_max_tokens() -> None:
    assert parse(sampling_parameters=text('{"max_tokens": null}')).fields == {"max_tokens": None}


@pytest.mark.parametrize("batched", [True, False])
def test_both_shapes_are_accepted(batched: bool) -> None:
    inputs = parse_inputs(
        {
            "text_input": text("hello", batched=batched),
            "stop_words": text("a", "b", batched=batched),
            "max_tokens": np.array([[4]] if batched else [4], dtype=np.int32),
        },
        {},
    )
    assert (inputs.text, inputs.fields) == ("hello", {"stop": ["a", "b"], "max_tokens": 4})


def test_flags_ask_for_outputs() -> None:
    assert parse().outputs == ()
    inputs = parse(return_log_probs=flag(True), return_finish_reason=flag(True))
    assert inputs.outputs == ("cum_log_probs", "output_log_probs", "finish_reason")
    assert inputs.fields == {"logprobs": 0}
    inputs = parse({"logprobs": 3}, return_log_probs=flag(True), return_finish_reason=flag(False))
    assert inputs.outputs == ("cum_log_probs", "output_log_probs")
    assert inputs.fields == {"logprobs": 3}


@pytest.mark.parametrize(
    ("return_logprobs", "logprobs", "outputs"),
    [
        (None, None, ()),
        (None, 2, ()),  # unset is false there
        (True, 2, ("logprobs",)),
        (True, 0, ("logprobs",)),
        (True, None, ("null_logprobs",)),  # vllm_backend answers "null"
        (False, 2, ()),
        (False, None, ()),
    ],
)
def test_return_logprobs_is_vllm_backends(
    return_logprobs: bool | None, logprobs: int | None, outputs: tuple[str, ...]
) -> None:
    given = {} if return_logprobs is None else {"return_logprobs": flag(return_logprobs)}
    inputs = parse({"logprobs": logprobs}, **given)
    assert inputs.outputs == outputs
    assert inputs.fields.get("logprobs") == logprobs


def test_a_cumulative_logprob_needs_no_logprobs() -> None:
    inputs = parse(return_cumulative_logprob=flag(True), return_logprobs=flag(True))
    assert inputs.outputs == ("cumulative_logprob", "null_logprobs")
    assert inputs.fields == {"logprobs": 0}


@pytest.mark.parametrize("name", REFUSED)
def test_what_other_servers_have_and_we_do_not_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name}: not supported by this .*; [a-z]"):
        parse(**{name: text("x")})


def test_the_names_of_tensorrt_llms_llm_api_are_ours() -> None:
    inputs = parse(
        sampling_param_max_tokens=i32(3),
        sampling_param_temperature=f32(0.5),
        sampling_param_top_k=i32(4),
        sampling_param_top_p=f32(0.5),
        sampling_param_stop=text("x", "y"),
        sampling_param_best_of=i32(2),
        sampling_param_seed=np.array([[7]], dtype=np.uint64),
        sampling_param_presence_penalty=f32(1),
        sampling_param_frequency_penalty=f32(0.25),
        sampling_param_exclude_input_from_output=flag(True),
        sampling_param_return_perf_metrics=flag(True),
        streaming=flag(True),
    )
    assert inputs.fields == {
        "max_tokens": 3,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.5,
        "stop": ["x", "y"],
        "best_of": 2,
        "seed": 7,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.25,
    }
    assert (inputs.stream, inputs.exclude_input_in_output) == (True, True)
    assert "arrival_time_ns" in inputs.outputs
    error = renamed(RequestError("no", param="top_k"), inputs.names)
    assert str(error) == "sampling_param_top_k: no"


def test_embedding_bias_pairs_words_and_weights() -> None:
    inputs = parse(
        embedding_bias_words=text("a", "b"), embedding_bias_weights=np.array([[1.5, -2.0]])
    )
    assert inputs.embedding_bias == (("a", 1.5), ("b", -2.0))
    assert parse(embedding_bias_words=text(""), embedding_bias_weights=f32(0.0)).fields == {}


def test_the_timeout_of_the_request_counts_for_want_of_an_input() -> None:
    assert parse(timeout_us=77).timeout_us == 77
    assert parse(timeout_us=77, timeout=u64(5)).timeout_us == 5


BAD: list[tuple[dict[str, Any], str]] = [
    ({"text_input": text("")}, "text_input: must not be empty"),
    ({"text_input": text("a", "b")}, r"text_input: must have the shape .* \[1, 2\]"),
    ({"text_input": np.array([[b"a"], [b"b"]], dtype=object)}, r"text_input: must have the shape"),
    ({"text_input": text(b"\xff\xfe")}, r"text_input: is not valid UTF-8 \(at byte 0\)"),
    ({"text_input": text(b"ok\xed\xa0\x80")}, r"text_input: is not valid UTF-8 \(at byte 2\)"),
    ({"text_input": i32(5)}, r"text_input: must be of type string \(got int32\)"),
    ({"messages": text("[]")}, "text_input, messages: give only one prompt"),
    ({"max_tokens": f32(1.0)}, r"max_tokens: must be of type integer \(got float32\)"),
    ({"max_tokens": i32()}, r"max_tokens: must have the shape"),
    ({"temperature": text("hot")}, "temperature: must be of type number"),
    ({"stream": i32(1)}, "stream: must be of type boolean"),
    ({"stop_words": text(b"\xff")}, "stop_words: is not valid UTF-8"),
    ({"stop_words": np.full((2, 2), b"x", dtype=object)}, "stop_words: must have the shape"),
    ({"sampling_parameters": text("{")}, "sampling_parameters: is not valid JSON"),
    ({"sampling_parameters": text("[1]")}, "sampling_parameters: must be a JSON object"),
    ({"sampling_parameters": text('{"a": NaN}')}, "sampling_parameters: is not valid JSON"),
    ({"sampling_parameters": text('{"stop": "\\ud800"}')}, "sampling_parameters: is not valid"),
    ({"sampling_parameters": text('{"a":' * 9999)}, "sampling_parameters: is nested too deeply"),
    ({"sampling_parameters": text('{"cache_salt": ""}')}, "cache_salt: must be a non-empty str"),
    ({"sampling_parameters": text('{"cache_salt": 5}')}, "cache_salt: must be a non-empty string"),
    ({"sampling_parameters": text('{"tenant": ""}')}, "tenant: must be a non-empty string"),
    ({"sampling_parameters": text('{"tenant_key": 1}')}, "tenant_key: must be a non-empty string"),
    ({"sampling_parameters": text(f'{{"tenant": "{"t" * 257}"}}')}, "tenant: has 257 characters"),
    ({"sampling_parameters": text('{"tenant": "\\ud800"}')}, "sampling_parameters: is not valid"),
    ({"end_id": i32(-2)}, r"end_id: must be at least -1 \(got -2\)"),
    ({"pad_id": i32(-1)}, "pad_id: must be at least 0"),
    ({"timeout": u64(0)}, "timeout: must be at least 1"),
    ({"embedding_bias_words": text("a")}, r"embedding_bias_weights: .* \(0 weights, 1 words\)"),
    (
        {"embedding_bias_words": text("a"), "embedding_bias_weights": f32(np.nan)},
        "embedding_bias_weights: must hold finite numbers",
    ),
]


@pytest.mark.parametrize(("tensors", "message"), BAD)
def test_bad_inputs_are_named(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        parse(**tensors)


@pytest.mark.parametrize(
    "tensors",
    [
        {"lora_task_id": u64(1)},
    ],
)
def test_what_comes_later_is_refused_as_such(tensors: dict[str, np.ndarray]) -> None:
    with pytest.raises(UnsupportedError, match=f"^{next(iter(tensors))}: not supported"):
        parse(**tensors)


def test_a_guide_asks_for_structured_output() -> None:
    inputs = parse(guided_decoding_guide_type=text("regex"), guided_decoding_guide=text("[a-z]+"))
    params = SamplingParams.parse(inputs.fields)
    assert params.structured_outputs is not None
    assert params.structured_outputs.text == "[a-z]+"
    assert SamplingParams.parse(params.model_dump(mode="json", exclude_defaults=True)) == params
    with pytest.raises(RequestError, match="guided_decoding_guide: needs"):
        parse(guided_decoding_guide=text("[a-z]+"))


def test_a_prompt_is_needed() -> None:
    with pytest.raises(RequestError, match="text_input: is missing"):
        parse_inputs({"max_tokens": i32(1)}, {})


def test_errors_use_the_names_that_the_client_used() -> None:
    inputs = parse(num_return_sequences=i32(0), stop_words=text("x"), max_tokens=i32(0))
    given = RequestError("too small; n.0: x; max_tokens: no; seen: yes", param="n")
    error = renamed(given, inputs.names)
    assert (
        str(error)
        == "num_return_sequences: too small; num_return_sequences.0: x; max_tokens: no; seen: yes"
    )
    assert (
        type(renamed(UnsupportedError("no", param="beam_width"), inputs.names)) is UnsupportedError
    )


NAMES = st.sampled_from(
    [
        *("text_input", "messages", "max_tokens", "stream", "temperature", "top_p", "top_k"),
        *("stop_words", "sampling_parameters", "seed", "end_id", "pad_id", "lora_task_id"),
        *("embedding_bias_words", "embedding_bias_weights", "return_log_probs", "timeout"),
        *("guided_decoding_guide", "exclude_input_in_output", "priority"),
    ]
)
SHAPES = st.sampled_from([(1,), (1, 1), (0,), (2,), (1, 2), (2, 1), (), (1, 1, 1), (1, 0)])
NUMERIC = st.sampled_from(["int32", "uint64", "float32", "float64", "bool", "uint8", "complex64"])
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
STRINGS = st.one_of(
    st.binary(max_size=8), JSON.map(lambda value: json.dumps(value).encode()), st.text(max_size=4)
)
TENSORS = st.one_of(
    npst.arrays(NUMERIC, SHAPES),
    SHAPES.flatmap(lambda shape: npst.arrays(object, shape, elements=STRINGS)),
)


@settings(max_examples=400)
@given(
    tensors=st.dictionaries(NAMES, TENSORS, max_size=5),
    parameters=st.dictionaries(
        st.text(max_size=6),
        st.one_of(st.booleans(), st.integers(), st.floats(), st.text()),
        max_size=2,
    ),
)
def test_garbage_gives_a_request_error_and_nothing_else(
    tensors: dict[str, np.ndarray], parameters: dict[str, Any]
) -> None:
    with contextlib.suppress(RequestError):
        inputs = parse_inputs(tensors, parameters)
        assert (inputs.text is None) != (inputs.messages is None)
