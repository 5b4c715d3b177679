"""The committed checkpoint: small, loadable, and good at what it was taught."""

import json
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import CHECKPOINT_DIR
from engine.demo.prompts import DEMO_PROMPTS
from tests.demo.corpus.documents import held_out_questions
from tests.demo.corpus.question import Question
from tests.demo.evaluate import answers
from tests.demo.tokenizer import TURN_CLOSING, turn_opening

_MULTI_BYTE = ("café", "こんにちは！", "你好，世界", "Łukasz 🔱🚀", "🦊❤️ привет")  # noqa: RUF001


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(CHECKPOINT_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32).eval()


def test_folder_is_complete_and_at_most_ten_megabytes() -> None:
    files = {file.name: file.stat().st_size for file in CHECKPOINT_DIR.iterdir()}
    assert {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } == set(files)
    assert sum(files.values()) <= 10_000_000


def test_config_is_a_bfloat16_llama_with_a_list_of_stops(tokenizer: Any) -> None:
    config = json.loads((CHECKPOINT_DIR / "config.json").read_text(encoding="utf-8"))
    generation = json.loads((CHECKPOINT_DIR / "generation_config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert generation["eos_token_id"] == stops


@pytest.mark.parametrize("text", _MULTI_BYTE)
def test_multi_byte_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_some_characters_are_split_over_several_tokens(tokenizer: Any) -> None:
    assert all(len(tokenizer.encode(character)) > 1 for character in "🔱猫🚀")


def test_digits_are_tokens_of_their_own(tokenizer: Any) -> None:
    assert tokenizer.tokenize("2026") == ["2", "0", "2", "6"]


def test_chat_template_writes_what_training_wrote(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    turns = [f"{turn_opening(m['role'])}{m['content']}{TURN_CLOSING}" for m in messages]
    assert rendered == "".join(turns) + turn_opening("assistant")
    without_prompt = tokenizer.apply_chat_template(messages, tokenize=False)
    assert without_prompt == "".join(turns)


def test_accuracy_on_questions_it_never_saw(model: Any, tokenizer: Any) -> None:
    exam = held_out_questions(7, 2)
    questions = [question for category in exam.values() for question in category]
    given = answers(model, tokenizer, questions)
    right = sum(
        answer is not None and question.accepts(answer)
        for question, answer in zip(questions, given, strict=True)
    )
    assert right / len(questions) >= 0.85


def test_demo_prompts_are_answered_to_the_end(model: Any, tokenizer: Any) -> None:
    questions = [Question("demo", prompt, "", held_out=False) for prompt in DEMO_PROMPTS]
    given = answers(model, tokenizer, questions)
    assert all(answer for answer in given)


def test_plain_text_is_completed(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0], skip_special_tokens=True) == (
        "The capital of France is Paris."
    )
