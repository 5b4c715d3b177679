"""Scales of a float8 KV cache in a checkpoint, under each of the names that tools give them."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.registry import read_model_spec
from engine.models.spec import ModelSpec
from engine.weights import SINGLE, load_weights
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES

LAYER = "model.layers.1.self_attn"
ONES = [1.0, 1.0]


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Tensor]:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path)
    return load_file(path / SINGLE)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("config")
    write_checkpoint(path)
    return read_model_spec(path)


def load(
    path: Path, config: ModelSpec, tensors: Mapping[str, Tensor], scales: Mapping[str, Tensor]
) -> CausalLM:
    save_file({**tensors, **{f"{LAYER}.{name}": t for name, t in scales.items()}}, path / SINGLE)
    model = build_model(config, max_model_len=16, dtype=torch.bfloat16, device=torch.device("cpu"))
    load_weights(model, path)
    return model


@pytest.mark.parametrize(
    ("scales", "k_scale", "v_scale"),
    [
        ({}, ONES, ONES),
        (
            {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor(0.25, dtype=torch.bfloat16)},
            [0.5, 0.5],
            [0.25, 0.25],
        ),
        ({"attn.k_scale": torch.tensor(3.0), "attn.v_scale": torch.tensor(2.0)}, [3, 3], [2, 2]),
        (
            {"k_proj.k_scale": torch.tensor(3.0), "v_proj.v_scale": torch.tensor(2.0)},
            [3, 3],
            [2, 2],
        ),
        (
            {"k_proj.output_scale": torch.tensor(3.0), "v_proj.output_scale": torch.tensor(2.0)},
            [3, 3],
            [2, 2],
        ),
        ({"kv_scale": torch.tensor(0.1)}, [0.1, 0.1], [0.1, 0.1]),
        ({"v_scale": torch.tensor([0.5, 4.0]).view(2, 1, 1)}, ONES, [0.5, 4.0]),
        ({"q_scale": torch.tensor(7.0), "prob_output_scale": torch.tensor(-1.0)}, ONES, ONES),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else None,
)
def test_what_the_names_mean(
    tmp_path: Path,
    config: ModelSpec,
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    k_scale: list[float],
    v_scale: list[float],
) -> None:
    layers = load(tmp_path, config, tensors, scales).model.layers
    found = layers[1].self_attn
    assert torch.equal(found.k_scale, torch.tensor(k_scale))
    assert torch.equal(found.v_scale, torch.tensor(v_scale))
    assert layers[0].self_attn.k_scale.tolist() == ONES  # another layer


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({"k_scale": torch.tensor(0.0)}, r"\.k_scale: must be positive \(got \[0\.0\]\)"),
        ({"k_scale": torch.tensor(float("nan"))}, r"\.k_scale: must be positive"),
        ({"v_scale": torch.tensor([1.0, float("inf")])}, r"\.v_scale: must be positive"),
        ({"v_scale": torch.ones(3)}, r"must hold one scale, or one for each of 2 K"),
        (
            {"kv_scale": torch.ones(1), "v_scale": torch.ones(1)},
            r"v_scale: sets .*\.v_scale, which|kv_scale: sets",
        ),
        ({"k_scale": torch.ones(1, dtype=torch.int8)}, r"\.k_scale: has dtype I8 in .*; supported"),
        ({"k_scales": torch.ones(1)}, r"k_scales: is not a tensor of this"),
    ],
)
def test_a_wrong_scale_is_refused(
    tmp_path: Path,
    config: ModelSpec,
    tensors: Mapping[str, Tensor],
    scales: Mapping[str, Tensor],
    message: str,
) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, config, tensors, scales)


def test_a_scale_of_a_layer_that_is_not_there_is_refused(
    tmp_path: Path, config: ModelSpec, tensors: Mapping[str, Tensor]
) -> None:
    beyond = {**tensors, "model.layers.3.self_attn.k_scale": torch.ones(1)}
    with pytest.raises(
        CheckpointError, match=r"^model\.layers\.3\.self_attn\.k_scale: belongs to a la"
    ):
        load(tmp_path, config, beyond, {})


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_those_of_a_text_part_are_found_and_others_are_not(tmp_path: Path, prefix: str) -> None:
    architecture, fields = FAMILIES["gemma3-vision"]
    write_checkpoint(tmp_path, architecture, **fields)
    tensors = {
        name.replace("language_model.model.", prefix): tensor
        for name, tensor in load_file(tmp_path / SINGLE).items()
    }
    tensors[f"{prefix}layers.1.self_attn.k_scale"] = torch.tensor(3.0)
    tensors["vision_tower.encoder.layers.1.self_attn.k_scale"] = torch.tensor(5.0)
    save_file(tensors, tmp_path / SINGLE)
    model = build_model(
        read_model_spec(tmp_path), max_model_len=16, dtype=torch.float32, device=torch.device("cpu")
    )
    load_weights(model, tmp_path)
    scales = [layer.self_attn.get_buffer("k_scale").tolist() for layer in model.model.layers]
    assert scales == [ONES, [3.0, 3.0], ONES]
