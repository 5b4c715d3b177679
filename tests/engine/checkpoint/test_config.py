"""`hf_overrides`: a checkpoint is served as if its `config.json` had these fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.checkpoint.config import overridden, read_config
from engine.config.engine_config import EngineConfig
from engine.errors import CheckpointError, ConfigError
from engine.layers.rope import DefaultRope, LinearRope
from engine.models.registry import read_model_spec
from engine.service.stages.preprocessor import Preprocessor
from tests.factories.checkpoints import ROPES, write_checkpoint
from tests.factories.quantized import change_config
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

THETA = 50_000.0
YARN = {name: value for name, value in ROPES["yarn"].items() if name != "rope_theta"}


def write(folder: Path, rope: dict[str, Any]) -> Path:
    """Write a checkpoint whose weights are the same for every `rope`."""
    tokenizer = byte_level_tokenizer()
    write_checkpoint(
        folder,
        "Qwen3ForCausalLM",
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        eos_token_id=tokenizer.eos_token_id,
        rope_parameters={**rope, "rope_theta": THETA},
    )
    return save_tokenizer(tokenizer, folder)


def older(folder: Path) -> Path:
    """Write the rope settings as transformers 4 did."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    path.write_text(json.dumps({**config, "rope_theta": THETA, "rope_scaling": None}))
    return folder


def answer(model: Path, **settings: Any) -> list[int]:
    fields = {"dtype": "float32", "device": "cpu", "num_gpu_blocks_override": 32, **settings}
    llm = LLM(str(model), **fields)
    prompt = [(7 * place) % 300 + 20 for place in range(50)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


@pytest.mark.parametrize("name", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("is_older", [False, True])
def test_the_context_is_extended_as_if_the_file_said_so(
    tmp_path: Path, name: str, is_older: bool
) -> None:
    plain = write(tmp_path / "plain", ROPES["default"])
    expected = answer(write(tmp_path / "yarn", YARN))
    if is_older:
        older(plain)
    assert answer(plain) != expected
    assert answer(plain, hf_overrides={name: YARN}) == expected
    assert answer(plain, hf_overrides=json.dumps({name: YARN})) == expected
    assert read_model_spec(plain).context_length == 64
    assert read_model_spec(plain, {name: YARN}).context_length == 128


@pytest.mark.parametrize("is_older", [False, True])
def test_both_names_of_a_field_mean_the_same(tmp_path: Path, is_older: bool) -> None:
    path = write(tmp_path, YARN)
    if is_older:
        scaling = {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"}
        change_config(older(path), rope_scaling=scaling)

    def rope(**overrides: Any) -> Any:
        return read_model_spec(path, overrides).layers[0].attention.rope

    assert rope(rope_scaling=None) == rope(rope_parameters=None) == DefaultRope(THETA)
    assert rope(rope_theta=7.0).theta == 7.0
    for kind in ("type", "rope_type"):
        assert rope(rope_scaling={kind: "linear", "factor": 2.0}) == LinearRope(THETA, 2.0)
    assert read_model_spec(path, {"torch_dtype": "float16"}).dtype == "float16"


def test_all_stages_know_it(tmp_path: Path) -> None:
    plain = write(tmp_path, ROPES["default"])
    (plain / "generation_config.json").unlink()
    overrides = {"max_position_embeddings": 96, "eos_token_id": 9}
    settings = EngineConfig.parse({"model": str(plain), "hf_overrides": overrides})
    assert Preprocessor.from_config(settings).max_model_len == 96
    llm = LLM(str(plain), device="cpu", num_gpu_blocks_override=16, hf_overrides=overrides)
    assert 9 in llm._core.generation_defaults.eos_token_ids
    assert llm._core.ready.max_model_len == 96


@pytest.mark.parametrize(
    ("values", "overrides", "expected"),
    [
        ({"a": 1}, None, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        (
            {"rope_parameters": {"t": 1}},
            {"rope_scaling": {"k": 2}},
            {"rope_parameters": {"t": 1, "k": 2}},
        ),
        (
            {"rope_scaling": {"t": 1}},
            {"rope_parameters": {"k": 2}},
            {"rope_scaling": {"t": 1, "k": 2}},
        ),
        (
            {"rope_scaling": None},
            {"rope_parameters": {"k": 2}},
            {"rope_scaling": None, "rope_parameters": {"k": 2}},
        ),
        (
            {"text_config": {"rope_parameters": {"t": 1}}},
            {"text_config": {"rope_scaling": {"t": 2}}},
            {"text_config": {"rope_parameters": {"t": 2}}},
        ),
    ],
)
def test_objects_are_changed_and_other_values_replaced(
    values: dict[str, Any], overrides: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    before = json.dumps(values)
    assert overridden(values, overrides) == expected
    assert json.dumps(values) == before


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    write(tmp_path, ROPES["default"])
    with pytest.raises(ConfigError, match=r"^hf_overrides: quantization_config: "):
        read_config(tmp_path, {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(CheckpointError, match=r"^config\.json: num_hidden_layers"):
        read_model_spec(tmp_path, {"num_hidden_layers": "many"})
    for wrong in ("{", "[]", "3", [1], "[" * 100_000):
        with pytest.raises(ConfigError, match=r"^hf_overrides: "):
            LLM(str(tmp_path), hf_overrides=wrong)
