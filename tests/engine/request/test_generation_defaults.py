"""What a checkpoint's files say about ending and sampling."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config.engine_config import EngineConfig
from engine.request.generation_defaults import GenerationDefaults
from engine.request.sampling_params import SamplingParams
from engine.text.tokenizer import Tokenizer
from tests.engine.text.other_decoders import word_piece_tokenizer
from tests.factories.errors import refuses
from tests.factories.tokenizers import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_tokenizer())


def read(folder: Path, tokenizer: Tokenizer, generation: Any = None, config: Any = None) -> Any:
    for name, fields in (("generation_config.json", generation), ("config.json", config)):
        if fields is not None:
            (folder / name).write_text(json.dumps(fields))
    return GenerationDefaults.from_checkpoint(folder, tokenizer, 10, EngineConfig())


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [
        ({"eos_token_id": [7, 8]}, {"eos_token_id": 9}, (7, 8, 0)),
        ({"eos_token_id": [0, 7]}, {"eos_token_id": 9}, (0, 7)),
        ({"eos_token_id": 7}, {"eos_token_id": 9}, (7, 0)),
        ({"eos_token_id": None}, {"eos_token_id": 9}, (9, 0)),
        ({"eos_token_id": []}, None, (0,)),
        (None, {"eos_token_id": [9, 9, 8]}, (9, 8, 0)),
        (None, None, (0,)),
    ],
)
def test_end_of_sequence_tokens(
    tmp_path: Path, tokenizer: Tokenizer, generation: Any, config: Any, eos: tuple[int, ...]
) -> None:
    assert read(tmp_path, tokenizer, generation, config).eos_token_ids == eos


def test_the_tokenizers_end_that_the_model_never_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 0}')
    tokenizer = Tokenizer(byte_level_tokenizer())
    tokenizer.hf_tokenizer.eos_token = "<|user|>"
    assert tokenizer.eos_token_id == 1
    for vocab_size, eos in ((10, (0, 1)), (1, (0,))):
        found = GenerationDefaults.from_checkpoint(tmp_path, tokenizer, vocab_size, EngineConfig())
        assert found.eos_token_ids == eos


def test_no_end_of_sequence_token(tmp_path: Path) -> None:
    defaults = read(tmp_path, Tokenizer(word_piece_tokenizer()))
    assert defaults.eos_token_ids == ()
    assert defaults.pad_token_id is None


def test_padding_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert read(tmp_path, tokenizer).pad_token_id == 0
    assert read(tmp_path, tokenizer, None, {"pad_token_id": 4}).pad_token_id == 4
    assert read(tmp_path, tokenizer, {"pad_token_id": 3}).pad_token_id == 3
    assert read(tmp_path, tokenizer, {"pad_token_id": -1}).pad_token_id == 4
    assert read(tmp_path, tokenizer, None, {"pad_token_id": -1}).pad_token_id == 0


SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": None}


@pytest.mark.parametrize(
    ("generation", "request_fields", "expected"),
    [
        (SAMPLING, {}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        (SAMPLING, {"temperature": 0.0}, {"temperature": 0.6, "top_p": 0.9, "top_k": 20}),
        ({"do_sample": True}, {}, {}),
        ({**SAMPLING, "do_sample": False}, {}, {"temperature": 0.0}),
        (
            {"temperature": 0.6, "repetition_penalty": 1.1},
            {},
            {"temperature": 0.0, "repetition_penalty": 1.1},
        ),
        ({}, {"max_tokens": 5}, {"temperature": 0.0}),
        ({}, {"top_p": 0.5}, {"temperature": 1.0}),
        ({}, {"top_k": 5}, {"temperature": 1.0}),
        ({}, {"min_p": 0.1}, {"temperature": 1.0}),
        ({}, {"typical_p": 0.5}, {"temperature": 1.0}),
        ({}, {"top_n_sigma": 1.0}, {"temperature": 1.0}),
        ({"do_sample": True, "typical_p": 0.9}, {}, {"typical_p": 0.9}),
        ({}, {"top_p": None}, {"temperature": 0.0}),
    ],
)
def test_sampling_defaults(
    tmp_path: Path,
    tokenizer: Tokenizer,
    generation: dict[str, Any],
    request_fields: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    assert read(tmp_path, tokenizer, generation).sampling_defaults(request_fields) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"generation_config": "vllm"}, {}),
        (
            {"override_generation_config": {"temperature": 0.3, "top_k": None}},
            {"temperature": 0.3, "top_p": 0.9},
        ),
        ({"override_generation_config": {"do_sample": False}}, {"temperature": 0.0}),
        (
            {"generation_config": "vllm", "override_generation_config": '{"min_p": 0.1}'},
            {"min_p": 0.1},
        ),
    ],
)
def test_the_settings_change_the_sampling_defaults(
    tmp_path: Path, tokenizer: Tokenizer, settings: dict[str, Any], expected: dict[str, Any]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**SAMPLING, "eos_token_id": 7}))
    config = EngineConfig.parse(settings)
    found = GenerationDefaults.from_checkpoint(tmp_path, tokenizer, 10, config)
    assert found.sampling_defaults({}) == expected
    assert found.eos_token_ids == (7, 0)


def test_a_temperature_of_the_settings_means_that_tokens_are_drawn(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    config = EngineConfig(override_generation_config={"temperature": 0.3})
    found = GenerationDefaults.from_checkpoint(tmp_path, tokenizer, 10, config)
    assert found.do_sample
    assert found.sampling_defaults({"top_p": 0.5}) == {"temperature": 0.3}


@pytest.mark.parametrize(
    "override", [{"max_new_tokens": 5}, {"temperature": -1}, {"do_sample": 2}, {"eos_token_id": 10}]
)
def test_a_wrong_override_is_named(
    tmp_path: Path, tokenizer: Tokenizer, override: dict[str, Any]
) -> None:
    config = EngineConfig(override_generation_config=override)
    with refuses("invalid_setting", f"override_generation_config: {next(iter(override))}"):
        GenerationDefaults.from_checkpoint(tmp_path, tokenizer, 10, config)


def test_the_request_wins_over_the_defaults(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fields = {"top_p": 0.5, "temperature": 0.2}
    defaults = read(tmp_path, tokenizer, {}).sampling_defaults(fields)
    params = SamplingParams.parse(fields, defaults=defaults)
    assert (params.temperature, params.top_p) == (0.2, 0.5)


@pytest.mark.parametrize(
    "generation",
    [
        {"eos_token_id": "2"},
        {"eos_token_id": [1, -2]},
        {"eos_token_id": [1, 10]},
        {"eos_token_id": -1},
        {"eos_token_id": True},
        {"pad_token_id": 1.5},
        {"do_sample": "yes"},
        {"temperature": -1, "do_sample": True},
        {"top_p": [1], "do_sample": True},
        {"repetition_penalty": 0},
    ],
)
def test_malformed_fields_are_named(
    tmp_path: Path, tokenizer: Tokenizer, generation: dict[str, Any]
) -> None:
    with refuses("invalid_checkpoint", f"generation_config.json: {next(iter(generation))}"):
        read(tmp_path, tokenizer, generation)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_malformed_file(tmp_path: Path, tokenizer: Tokenizer, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with refuses("invalid_checkpoint", "generation_config.json"):
        GenerationDefaults.from_checkpoint(tmp_path, tokenizer, 10, EngineConfig())
