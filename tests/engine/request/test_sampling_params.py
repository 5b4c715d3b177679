from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import SamplingParams
from engine.errors import RequestError, UnsupportedError
from kernels.step.sampling_columns import SAMPLING_COLUMNS
from tests.factories.errors import refuses


def test_numbers_may_come_as_strings() -> None:
    params = SamplingParams.parse(
        {"max_tokens": "16", "temperature": "0.5", "ignore_eos": "true", "top_k": "-1", "seed": "7"}
    )
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (16, 0.5, True)
    assert (params.top_k, params.seed) == (0, 7)


@pytest.mark.parametrize("seed", [-1, "-1", None])
def test_a_seed_of_minus_one_is_none(seed: object) -> None:
    assert SamplingParams.parse({"seed": seed}).seed is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, r"max_tokens: must be at least 1 without prompt_logprobs \(got 0\)"),
        ({"max_tokens": -1}, "max_tokens: .*greater than or equal to 0.*got -1"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: .*greater than or equal to 0: .*all tokens"),
        ({"logprobs": "-1"}, "logprobs: .*greater than or equal to 0: .*all tokens"),
        ({"logprobs": -2}, "logprobs: .*greater than or equal to 0"),
        ({"max_tokens": 1.5}, "max_tokens: .*integer"),
        ({"temperature": -0.1}, "temperature: .*greater than or equal to 0"),
        ({"temperature": float("nan")}, "temperature: .*finite"),
        ({"temperature": float("inf")}, "temperature: .*finite"),
        ({"temperature": "hot"}, "temperature: .*number.*'hot'"),
        ({"top_p": 0}, "top_p: .*greater than 0"),
        ({"top_p": 1.01}, "top_p: .*less than or equal to 1"),
        ({"top_k": -2}, "top_k: "),
        ({"top_k": 2**31}, "top_k: .*less than 2147483648"),
        ({"max_tokens": 2**31}, "max_tokens: "),
        ({"stop_token_ids": [2**70]}, r"stop_token_ids\[0\]: "),
        ({"min_p": 2}, "min_p: "),
        ({"typical_p": 0}, "typical_p: .*greater than 0"),
        ({"typical_p": 1.1}, "typical_p: .*less than or equal to 1"),
        ({"top_n_sigma": -0.5}, "top_n_sigma: .*greater than or equal to 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: "),
        ({"presence_penalty": 2.1}, "presence_penalty: "),
        ({"frequency_penalty": -2.1}, "frequency_penalty: "),
        ({"n": 0}, "n: "),
        ({"n": 257}, "n: "),
        ({"seed": -(2**63) - 1}, "seed: "),
        ({"seed": 2**64}, "seed: "),
        ({"stop": 5}, "stop: "),
        ({"stop": ["a", 5]}, r"stop\[1\]: "),
        ({"stop": ["a"] * 257}, "stop: .*at most 256"),
        ({"stop": "a" * 1025}, r"stop\[0\]: .*at most 1024"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\]: "),
        ({"stop_token_ids": [2**64]}, r"stop_token_ids\[0\]: "),
        ({"logit_bias": {str(2**64): 1}}, "logit_bias.18446744073709551616"),
        ({"max_tokens": None, "min_tokens": 2**64}, "min_tokens: .*less than 2147483648"),
        ({"logprobs": 2**64}, "logprobs: "),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"7": 100.5}}, "logit_bias.7: .*less than or equal to 100"),
        ({"logit_bias": {"7": -101}}, "logit_bias.7: .*greater than or equal to -100"),
        ({"dry_base": 0.9}, "dry_base: .*greater than or equal to 1"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n: .*greater than or equal to -1"),
        ({"dry_sequence_breakers": [7]}, r"dry_sequence_breakers\[0\]: "),
        ({"logits_processors": [{"name": "x", "args": 3}]}, r"logits_processors\[0\].args: "),
        ({"logits_processors": "x"}, "logits_processors: "),
        ({"allowed_token_ids": []}, "allowed_token_ids: must not be empty"),
        ({"min_tokens": 5, "max_tokens": 4}, r"min_tokens: must not exceed max_tokens \(5 > 4\)"),
        ({"temprature": 1}, "temprature: unknown field"),
        ({"max_tokens": -1, "top_p": 3}, "top_p: .*; max_tokens: "),
    ],
)
def test_a_wrong_value_is_an_error_that_names_the_field(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams.parse(fields)


@pytest.mark.parametrize(
    "fields",
    [{"lora_name": "a"}, {"repetition_detection": {}}, {"extra_args": {}}],
)
def test_what_is_not_offered_yet_is_refused_by_name(fields: dict[str, Any]) -> None:
    message = f"{next(iter(fields))}: not supported by this version"
    with pytest.raises(UnsupportedError, match=f"^{message}"):
        SamplingParams.parse(fields)
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"detokenize": True, "spaces_between_special_tokens": True, "max_tokens": 3},
        {"guided_decoding": None, "truncate_prompt_tokens": None, "extra_args": None},
        {"use_beam_search": True, "n": 2},
        {"guided_regex": "a+"},
        {"guided_decoding": {"regex": "a+"}},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_the_constructor_takes_what_parse_takes(fields: dict[str, Any]) -> None:
    given = dict(fields)
    assert SamplingParams(**fields) == SamplingParams.parse(fields)
    assert fields == given


def test_sampling_columns_are_off_by_default_except_the_temperature() -> None:
    params = SamplingParams()
    on = {n for n, column in SAMPLING_COLUMNS.items() if getattr(params, n) != column.off}
    assert on == {"temperature"}


def test_a_clone_is_equal() -> None:
    params = SamplingParams(seed=3, stop=["a"])
    assert params.clone() == params


def test_neutral_values_are_harmless() -> None:
    SamplingParams.parse({"detokenize": "true", "lora_name": None})
    assert SamplingParams.parse(
        {"beam_width": None, "best_of": None, "length_penalty": None, "early_stopping": None}
    ) == SamplingParams.parse(
        {"beam_width": "1", "best_of": None, "use_beam_search": "false", "length_penalty": "1.0"}
    )


@pytest.mark.parametrize(
    ("fields", "n", "width"),
    [
        ({"beam_width": 4}, 1, 4),
        ({"beam_width": "4", "n": "2"}, 2, 4),
        ({"use_beam_search": True, "n": 3}, 3, 3),
        ({"use_beam_search": True, "best_of": 4}, 1, 4),
        ({"use_beam_search": "true", "best_of": 4, "n": 2}, 2, 4),
        ({"use_beam_search": True, "beam_width": 4, "n": None, "best_of": None}, 1, 4),
    ],
)
def test_each_way_of_asking_for_beams(fields: dict[str, object], n: int, width: int) -> None:
    known = {name: value for name, value in fields.items() if value is not None}
    params = SamplingParams.parse(known)
    assert (params.n, params.beam_width, params.num_sequences) == (n, width, width)
    assert SamplingParams.parse(params.model_dump(exclude_defaults=True)) == params


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 2, "n": 3}, r"n: must not exceed beam_width \(3 > 2\)"),
        ({"beam_width": 2, "best_of": 2}, "best_of: is not supported with beam_width"),
        ({"beam_width": 2, "stop": "a"}, "stop: is not supported with beam_width"),
        ({"beam_width": 2, "guided_regex": "a"}, "structured_outputs: is not supported"),
        ({"beam_width": 2, "max_tokens": 0, "prompt_logprobs": 0}, "max_tokens: must be at least"),
        ({"beam_width": 65}, "beam_width: .*64"),
        ({"beam_width": 0}, "beam_width: .*1"),
        ({"length_penalty": 10.5}, "length_penalty: .*10"),
        ({"early_stopping": "sometimes"}, "early_stopping"),
        ({"use_beam_search": True}, "use_beam_search: needs best_of or n above 1"),
        ({"use_beam_search": "maybe", "n": 2}, "use_beam_search: must be true or false"),
        ({"best_of": 2, "n": 3}, r"best_of: must be at least n \(2 < 3\)"),
    ],
)
def test_what_beams_cannot_be_asked_for(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}"):
        SamplingParams.parse(fields)


def test_one_stop_string_or_many_and_empty_ones_are_none() -> None:
    assert SamplingParams.parse({"stop": "a"}).stop == ("a",)
    assert SamplingParams.parse({"stop": ["a", "", "b"]}).stop == ("a", "b")
    assert SamplingParams.parse({"stop": ""}).stop == ()
    assert SamplingParams.parse({"stop": None}).stop == ()


def test_the_request_wins_over_the_defaults() -> None:
    params = SamplingParams.parse({"top_p": 0.5}, defaults={"top_p": 0.9, "temperature": 0.3})
    assert (params.top_p, params.temperature) == (0.5, 0.3)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)


@given(
    st.dictionaries(
        st.sampled_from([*SamplingParams.model_fields, "beam_width", "length_penalty", "x"]), _JSON
    )
)
def test_garbage_is_an_error_of_ours_or_valid(fields: dict[str, object]) -> None:
    try:
        params = SamplingParams.parse(fields)
    except RequestError:
        return
    assert SamplingParams.parse(params.model_dump()) == params


def test_a_rule_over_two_fields_is_told_in_its_own_words() -> None:
    with refuses("invalid_value", "min_tokens", match=r"must not exceed max_tokens \(5 > 4\)"):
        SamplingParams.parse({"min_tokens": 5, "max_tokens": 4, "stop": ["a"]})
