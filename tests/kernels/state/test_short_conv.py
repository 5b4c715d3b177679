from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.state.short_conv import short_conv
from kernels.state.states import StateCache
from tests.kernels.state.state_cases import ConvLayer, Row, StateSequence, build_step, run_step
from tests.kernels.support import DEVICE, assert_close, randn

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


@each_dtype
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_short_conv_whole_pass_matches_transformers(bias: bool, dtype: torch.dtype) -> None:
    lfm2 = pytest.importorskip("transformers.models.lfm2")
    config = lfm2.Lfm2Config(
        hidden_size=40, conv_L_cache=3, conv_bias=bias, num_hidden_layers=1, layer_types=["conv"]
    )
    module = lfm2.modeling_lfm2.Lfm2ShortConv(config, 0).to(DEVICE, dtype)
    x = randn(1, 19, 40, dtype=dtype)
    with torch.no_grad():
        expected = module(x)[0]
        layer = ConvLayer(dtype=dtype)
        sequence = StateSequence({"projected": module.in_proj(x)[0]})
        step, inputs = build_step(layer, [Row(sequence, 19, writes=1)])
        weight, conv_bias = module.conv.weight.squeeze(1), module.conv.bias
        mixed = short_conv(inputs["projected"], weight, conv_bias, layer.cache(2), step)
        assert_close(module.out_proj(mixed), expected, TOLERANCES[dtype])


@each_dtype
@pytest.mark.parametrize(
    ("channels", "kernel_size", "ring_size", "num_tokens"),
    [(1, 1, 1, 5), (40, 3, 3, 1), (63, 4, 7, 9), (1024, 3, 3, 70), (200, 2, 4, 130)],
)
def test_short_conv_shapes_match_the_reference(
    channels: int, kernel_size: int, ring_size: int, num_tokens: int, dtype: torch.dtype
) -> None:
    layer = ConvLayer(channels, kernel_size, ring_size=ring_size, dtype=dtype)
    sequence = StateSequence(layer.inputs(num_tokens, seed=1))
    step, inputs = build_step(layer, [Row(sequence, num_tokens, writes=1)])
    cache, expected_cache = layer.cache(2), layer.cache(2)
    out = layer.run(inputs, cache, step)
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = layer.reference(inputs, expected_cache, step)
    assert_close(out, expected, TOLERANCES[dtype])
    assert torch.equal(cache.ring[1], expected_cache.ring[1])


def test_short_conv_ring_has_the_gated_inputs_by_position() -> None:
    layer = ConvLayer(ring_size=5)
    sequence = StateSequence(layer.inputs(13, seed=1))
    cache = layer.cache(3)
    run_step(layer, cache, [Row(sequence, 2, writes=1)])
    inner, _, x = sequence.inputs["projected"].chunk(3, dim=-1)
    assert torch.equal(cache.ring[1, :2], (inner * x)[:2])
    assert not cache.ring[1, 2:].any()  # positions before the sequence
    run_step(layer, cache, [Row(sequence, 11, writes=2)])
    for position in range(8, 13):
        assert torch.equal(cache.ring[2, position % 5], (inner * x)[position])


def test_short_conv_accepts_a_transposed_weight() -> None:
    layer = ConvLayer()
    sequence = StateSequence(layer.inputs(6, seed=1))
    step, inputs = build_step(layer, [Row(sequence, 6, writes=1)])
    weight = randn(40, 3)
    out, same = (
        short_conv(inputs["projected"], each, None, layer.cache(2), step)
        for each in (weight, weight.t().contiguous().t())
    )
    assert torch.equal(out, same)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("projected", _ones(5, 120, dtype=torch.int64), "projected: must be"),
        ("projected", _ones(5, 80), r"projected: must have shape \[any, 120\]"),
        ("projected", _ones(120, 5).t(), "projected: the last dimension must be contiguous"),
        ("weight", _ones(40), r"weight: must have shape \[any, any\]"),
        ("weight", _ones(40, 0), "weight: must not be empty"),
        ("weight", _ones(40, 3).half(), r"weight: must be torch\.float32"),
        ("bias", _ones(41), r"bias: must have shape \[40\]"),
        ("bias", _ones(80)[::2], "bias: must be contiguous"),
        ("cache", StateCache(_ones(2, 2, 40), None), r"cache\.ring: must have a row for each"),
        ("cache", StateCache(_ones(2, 3, 41), None), r"cache\.ring: must have shape"),
        ("cache", StateCache(_ones(0, 3, 40), None), r"cache\.ring: must have a block 0"),
        ("cache", StateCache(_ones(2, 40, 3).mT, None), r"cache\.ring: each block"),
        ("cache", StateCache(_ones(2, 3, 40).half(), None), r"cache\.ring: must be torch"),
    ],
)
def test_short_conv_wrong_arguments_are_named(name: str, wrong: Any, message: str) -> None:
    layer = ConvLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(5, seed=1)), 5, writes=1)])
    arguments: dict[str, Any] = {
        **inputs, "weight": _ones(40, 3), "bias": None, "cache": layer.cache(2), "step": step
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        short_conv(**{**arguments, name: wrong})
