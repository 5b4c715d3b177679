"""What is left of a prompt, and what of it is echoed."""

from __future__ import annotations

import json

import pytest

from engine.errors import RequestError
from engine.service.stub.engine_inputs import parse_engine_inputs
from tests.engine.service.stages.test_preprocessor import READY, TOKENIZER, chat, request, tensor


def test_a_character_that_the_output_may_complete_is_not_echoed() -> None:
    *ids, last = TOKENIZER.encode("a🎉")
    assert len(ids) > 1
    echoed = request(input_ids=ids, exclude_input_in_output=False)
    assert echoed.options.text_prefix == "a"
    whole = request(input_ids=[*ids, last], exclude_input_in_output=False)
    assert whole.options.text_prefix == "a🎉"


def test_a_prompt_is_cut_to_its_end_if_it_shall_be() -> None:
    ids = list(range(20))
    sampling = json.dumps({"truncate_prompt_tokens": 3})
    cut = request(input_ids=ids, sampling_parameters=sampling)
    assert cut.input_ids.tolist() == ids[-3:]
    text = "Some words, and some more of them"
    echo = {"exclude_input_in_output": False, "sampling_parameters": sampling}
    cut, whole = request(text_input=text, **echo), request(text_input=text)
    assert cut.input_ids.tolist() == whole.input_ids.tolist()[-3:]
    assert cut.options.text_prefix
    assert text.endswith(cut.options.text_prefix)
    # Also one that without it would be refused before all of it is tokenised.
    for long in ({"text_input": 50 * text}, {"messages": chat(50 * text)}):
        with pytest.raises(RequestError, match="more than"):
            request(**long)
        assert len(request(sampling_parameters=sampling, **long).input_ids) == 3
    tensors = {"input_ids": tensor(ids), "sampling_parameters": tensor(sampling)}
    with pytest.raises(RequestError, match=r"^truncate_prompt_tokens: "):
        parse_engine_inputs(tensors, {}, 0, READY)
