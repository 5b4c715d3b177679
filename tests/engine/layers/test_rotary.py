"""Rotary tables against transformers' own rotary modules."""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.fields import Fields
from engine.layers.rope import DynamicRope, QueryScaling, Rope
from engine.layers.rotary import RotaryEmbedding, rotary_table
from engine.models.rope import parse_rope

CPU = torch.device("cpu")
MAX_POSITIONS, LENGTH, HEAD_DIM = 96, 400, 32
EPS = torch.finfo(torch.float32).eps

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SETTINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "theta": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "linear": {"rope_type": "linear", "factor": 4},
    "yarn": YARN,
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn-mscale-alone": {**YARN, "mscale": 0.707},
    "yarn-mscale-of-0": {**YARN, "mscale": 0.707, "mscale_all_dim": 0},
    "yarn-betas": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-narrow-ramp": {**YARN, "beta_fast": 1.01, "beta_slow": 1, "rope_theta": 500.0},
    "yarn-shrinking": {**YARN, "factor": 1.0},
    "yarn-null-factor": {**YARN, "factor": None, "original_max_position_embeddings": 24},
    "llama3": LLAMA3,
    "llama3-theta": {**LLAMA3, "rope_theta": 500000.0, "factor": 32.0},
}


def _parse(settings: dict[str, Any]) -> Rope:
    values = {"rope_parameters": settings, "max_position_embeddings": MAX_POSITIONS}
    return parse_rope(Fields(values, name="config.json"))


def _theirs(settings: dict[str, Any], positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin as transformers computes them for a sequence of these positions."""
    module = _module(settings)
    cos, sin = module(torch.zeros(1), positions[None])
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


def _module(settings: dict[str, Any]) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(settings),
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_tables_equal_transformers(name: str) -> None:
    rope = _parse(SETTINGS[name])
    cos, sin = rotary_table(rope, HEAD_DIM, LENGTH)
    assert cos.dtype == sin.dtype == torch.float32
    their_cos, their_sin = _theirs(SETTINGS[name], torch.arange(LENGTH))
    # The angles are the same numbers: products of the same two. cos, sin and the scale of YaRN are
    # rounded, which the shape of the tensor may change.
    torch.testing.assert_close(cos, their_cos, rtol=0, atol=8 * EPS)
    torch.testing.assert_close(sin, their_sin, rtol=0, atol=8 * EPS)


@pytest.mark.parametrize("name", [*SETTINGS, None])
def test_an_outline_has_the_size_of_the_table(name: str | None) -> None:
    rope = None if name is None else _parse(SETTINGS[name])
    table, outline = (
        RotaryEmbedding(rope, HEAD_DIM, LENGTH, device=torch.device(device))
        for device in ("cpu", "meta")
    )
    for buffer in ("cos", "sin"):
        theirs, ours = table.get_buffer(buffer), outline.get_buffer(buffer)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.device.type == "meta"


def test_the_settings_differ_from_each_other() -> None:
    """Each of the settings above changes the table, so that ignoring it would be seen."""
    tables = [torch.cat(rotary_table(_parse(SETTINGS[n]), HEAD_DIM, LENGTH)) for n in SETTINGS]
    plain = ("yarn", "yarn-mscale-alone", "yarn-mscale-of-0")
    same = {*combinations(plain, 2), ("default", "yarn-shrinking")}
    for i, first in enumerate(SETTINGS):
        for j, second in enumerate(SETTINGS):
            if i < j and (first, second) not in same:
                assert not torch.allclose(tables[i], tables[j], atol=1e-3), (first, second)


def test_dynamic_rows_have_the_base_of_the_sequence_they_end() -> None:
    settings = {"rope_type": "dynamic", "factor": 3.0}
    rope = _parse(settings)
    assert rope == DynamicRope(10000.0, 3.0, MAX_POSITIONS)
    cos, sin = rotary_table(rope, HEAD_DIM, LENGTH)
    for position in (0, 1, MAX_POSITIONS - 1, MAX_POSITIONS, MAX_POSITIONS + 1, LENGTH - 1):
        their_cos, their_sin = _theirs(settings, torch.tensor([position]))
        # The base is computed in another order: a few roundings of the frequency, which is at most
        # 1, times the position.
        atol = 8 * EPS * max(1, position)
        torch.testing.assert_close(cos[position : position + 1], their_cos, rtol=0, atol=atol)
        torch.testing.assert_close(sin[position : position + 1], their_sin, rtol=0, atol=atol)
    unscaled, _ = rotary_table(_parse(SETTINGS["default"]), HEAD_DIM, LENGTH)
    torch.testing.assert_close(
        cos[:MAX_POSITIONS], unscaled[:MAX_POSITIONS], rtol=0, atol=8 * EPS * MAX_POSITIONS
    )
    assert not torch.allclose(cos[-1], unscaled[-1], atol=1e-2)


def test_queries_grow_in_steps_beyond_the_original_length() -> None:
    rope, scaling = _parse(SETTINGS["default"]), QueryScaling(0.1, 8)

    def layer(length: int) -> RotaryEmbedding:
        return RotaryEmbedding(rope, HEAD_DIM, length, query_scaling=scaling, device=CPU)

    scale = layer(20)(torch.tensor([0, 7, 8, 15, 16, 19])).query_scale
    assert scale is not None
    steps = 1 + 0.1 * torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0]).log()
    torch.testing.assert_close(scale, steps)
    assert layer(8)(torch.tensor([7])).query_scale is None  # all of them are 1


def test_the_layer_looks_positions_up() -> None:
    rope = _parse(SETTINGS["default"])
    cos, sin, scale = RotaryEmbedding(rope, HEAD_DIM, 10, device=CPU)(torch.tensor([9, 0, 9]))
    table_cos, table_sin = rotary_table(rope, HEAD_DIM, 10)
    assert torch.equal(cos, table_cos[[9, 0, 9]])
    assert torch.equal(sin, table_sin[[9, 0, 9]])
    assert scale is None
