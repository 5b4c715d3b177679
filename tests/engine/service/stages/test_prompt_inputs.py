"""How clients ask for log-probabilities of the prompt, and for the prompt itself."""

import pytest

from engine.errors import RequestError, UnsupportedError
from tests.engine.service.stages.test_request_inputs import flag, parse


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
