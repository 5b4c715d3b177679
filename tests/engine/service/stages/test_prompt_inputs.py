"""How clients ask for log-probabilities of the prompt, and for the prompt itself."""

import pytest

from engine.errors import RequestError, UnsupportedError
from engine.service.stages.request_inputs import parse_inputs
from tests.engine.service.stages.test_request_inputs import flag, i32, parse, text


def test_log_probabilities_of_the_prompt_come_as_json_and_on_request_as_numbers() -> None:
    assert parse({"prompt_logprobs": 2}).outputs == ("prompt_logprobs",)
    inputs = parse({"prompt_logprobs": "2"}, return_log_probs=flag(True))
    assert inputs.outputs == (
        *("cum_log_probs", "output_log_probs", "prompt_logprobs", "prompt_log_probs"),
    )
    assert inputs.fields == {"prompt_logprobs": "2", "logprobs": 0}
    assert parse({"prompt_logprobs": None}).outputs == ()


@pytest.mark.parametrize(
    ("given", "excluded", "fields"),
    [
        ({"echo": True}, False, {}),
        ({"echo": "False"}, True, {}),
        ({"echo": None}, None, {}),
        ({"echo": True, "logprobs": 3}, False, {"logprobs": 3, "prompt_logprobs": 3}),
        (
            {"echo": True, "logprobs": 3, "prompt_logprobs": 0},
            False,
            {"logprobs": 3, "prompt_logprobs": 0},
        ),
        ({"echo": False, "logprobs": 3}, True, {"logprobs": 3}),
        ({"logprobs": 3}, None, {"logprobs": 3}),
    ],
)
def test_echo_is_that_of_openais_completions(
    given: dict[str, object], excluded: bool | None, fields: dict[str, int]
) -> None:
    inputs = parse(given)
    assert inputs.exclude_input_in_output == excluded
    assert inputs.fields == fields
    assert ("prompt_logprobs" in inputs.outputs) == ("prompt_logprobs" in fields)


def test_echo_wins_over_the_input() -> None:
    assert (
        parse({"echo": True}, exclude_input_in_output=flag(True)).exclude_input_in_output is False
    )


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_a_wrong_echo_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match=r"^echo: must be true or false"):
        parse({"echo": value})


@pytest.mark.parametrize("name", ["return_context_logits", "return_generation_logits"])
def test_logits_are_refused_by_name(name: str) -> None:
    assert parse(**{name: flag(False)}).outputs == ()
    with pytest.raises(UnsupportedError, match=f"^{name}: .*prompt_logprobs"):
        parse(**{name: flag(True)})


def test_a_prompt_may_be_token_ids() -> None:
    given = parse_inputs({"input_ids": i32(5, 6)}, {}).input_ids
    assert given is not None
    assert given.tolist() == [5, 6]
    with pytest.raises(RequestError, match=r"^text_input, input_ids: give only one"):
        parse(input_ids=i32(5))
    with pytest.raises(RequestError, match=r"^input_ids: must not be empty"):
        parse_inputs({"input_ids": i32()}, {})


def test_chat_parameters_are_of_messages() -> None:
    given = text('{"add_generation_prompt": false}')
    chat = parse_inputs({"messages": text("[]"), "chat_parameters": given}, {}).chat
    assert not chat.add_generation_prompt
    with pytest.raises(RequestError, match=r"^chat_parameters: needs messages"):
        parse(chat_parameters=given)
