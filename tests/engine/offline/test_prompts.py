"""What the offline API takes and gives as vLLM's does: prompts, conversations, arguments."""

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import UnsupportedError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
QUESTION = [{"role": "user", "content": "Hi"}]
STARTED = [*QUESTION, {"role": "assistant", "content": "Ho"}]


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(checkpoint, dtype="float", block_size=4, tensor_parallel_size=1)


def test_objects_are_prompts(llm: LLM) -> None:
    [text] = llm.generate({"prompt": "The quick"}, GREEDY, False)
    ids = text.prompt_token_ids
    many = [{"prompt_token_ids": ids}, {"prompt": "The quick", "prompt_token_ids": ids}, ids]
    outputs = llm.generate(many, GREEDY, False)
    assert [output.prompt for output in outputs] == [None, "The quick", None]
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {
        tuple(text.outputs[0].token_ids)
    }
    assert len({output.request_id for output in (text, *outputs)}) == 4
    assert all(output.finished for output in outputs)


def test_an_object_may_bring_its_salt(llm: LLM) -> None:
    ids = list(range(130, 163))
    cached = []
    for salt in ("a", "b", "a"):
        prompt = {"prompt_token_ids": ids, "cache_salt": salt, "multi_modal_data": None}
        cached.append(llm.generate(prompt, GREEDY, False)[0].num_cached_tokens)
    assert cached == [0, 0, 32]


def test_an_unknown_field_of_a_prompt_is_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompts\.0\.multi_modal_data: unknown field"):
        llm.generate([{"prompt": "x", "multi_modal_data": {"image": 1}}], GREEDY, False)


@pytest.mark.parametrize("prompts", [None, 5, b"The quick", [b"The quick"], [{"prompt": b"x"}]])
def test_what_is_no_text_and_no_list_is_no_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompts(\.0)?: must be a string, a list of token ids"):
        llm.generate(prompts, GREEDY, False)


@pytest.mark.parametrize("messages", [None, 5, "Hi", QUESTION[0], ["Hi"], [None], [5]])
def test_what_is_no_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match=r"^messages: must be a list \(got "):
        llm.chat(messages, GREEDY, False)


@pytest.mark.parametrize("params", [5, "x", {"max_tokens": 3}, [None], [GREEDY, {"n": 1}]])
def test_what_are_no_sampling_parameters_is_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampling_params: must be `SamplingParams`"):
        llm.generate([[1, 2], [3]], params, False)


def test_the_prompt_that_is_refused_is_told(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"^prompt 1: input_ids: the prompt is empty"):
        llm.generate(["The quick", ""], GREEDY, False)


def test_a_prompt_is_not_cut_to_nothing_for_max_tokens(llm: LLM) -> None:
    fields = {"truncate_prompt_tokens": -1, "temperature": 0}
    [output] = llm.generate([[5, 6, 7]], SamplingParams.parse({**fields, "max_tokens": 126}), False)
    assert output.prompt_token_ids == [6, 7]
    with pytest.raises(ValueError, match=r"^truncate_prompt_tokens: -1 .* max_tokens is 128, and"):
        llm.generate([[5, 6, 7]], SamplingParams.parse({**fields, "max_tokens": 128}), False)


def test_arguments_of_vllm_may_ask_for_nothing(llm: LLM) -> None:
    llm.generate([1, 2, 3], GREEDY, False, lora_request=None, priority=None)
    with pytest.raises(UnsupportedError, match=r"^lora_request: not supported"):
        llm.generate([1, 2, 3], GREEDY, lora_request="x")
    with pytest.raises(ValueError, match=r"^use_tqmd: unknown argument"):
        llm.chat(QUESTION, GREEDY, use_tqmd=False)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "<|user|>Hi<|end|><|assistant|>Ho<|end|><|assistant|>"),
        ({"add_generation_prompt": False}, "<|user|>Hi<|end|><|assistant|>Ho<|end|>"),
        ({"continue_final_message": True}, "<|user|>Hi<|end|><|assistant|>Ho"),
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            "<|user|>Hi<|end|><|assistant|>Ho",
        ),
    ],
)
def test_the_end_of_a_conversation(llm: LLM, options: dict[str, Any], prompt: str) -> None:
    assert llm.chat(STARTED, GREEDY, False, **options)[0].prompt == prompt


def test_a_template_of_the_callers_own(llm: LLM) -> None:
    (output,) = llm.chat(QUESTION, GREEDY, False, chat_template="Q: {{ messages[0].content }}")
    assert output.prompt == "Q: Hi"
    assert "Q: " not in (llm.chat(STARTED, GREEDY, False)[0].prompt or "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template": ["{{ messages }}"]}, "chat_template: must be a string"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools: not supported by"),
        ({"chat_template_kwargs": {"thinking": True}}, r"chat_template_kwargs\.thinking: not"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message: cannot be true together with add_generation_prompt",
        ),
    ],
)
def test_what_a_template_cannot_do_is_refused(
    llm: LLM, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        llm.chat(QUESTION, GREEDY, False, **options)


def test_its_tokenizer_and_default_parameters(llm: LLM) -> None:
    ids = llm.get_tokenizer()("The quick")["input_ids"]
    assert ids == llm.generate("The quick", GREEDY, False)[0].prompt_token_ids
    assert llm.get_default_sampling_params().temperature == 0  # as transformers would
