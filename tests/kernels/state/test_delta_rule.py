from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state.delta_rule import gated_delta_rule
from kernels.state.states import StateCache
from tests.kernels.state.state_cases import (
    DeltaLayer,
    Inputs,
    Row,
    StateSequence,
    build_step,
    run_step,
)
from tests.kernels.support import DEVICE, assert_close, randn

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
LAYERS = [
    DeltaLayer(),
    DeltaLayer(num_key_heads=1, num_heads=3, key_dim=96, value_dim=192, kernel_size=3),
    DeltaLayer(num_heads=2, key_dim=128, value_dim=128, ring_size=6),
    DeltaLayer(num_heads=2, key_dim=5, value_dim=7, gate="sigmoid", kernel_size=2),
    DeltaLayer(num_key_heads=1, num_heads=1, key_dim=1, value_dim=1, kernel_size=1, ring_size=1),
]


def _module(dtype: torch.dtype) -> Any:
    """Return transformers' layer of 4 value heads and 2 key heads, with decays of any speed."""
    qwen3_5 = pytest.importorskip("transformers.models.qwen3_5")
    config = qwen3_5.Qwen3_5TextConfig(
        hidden_size=64, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=24,
        linear_value_head_dim=40, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    module = qwen3_5.modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0).to(DEVICE, dtype)
    with torch.no_grad():
        module.A_log.copy_(torch.linspace(-5, 2, 4))
        module.norm.weight.copy_(randn(40, seed=3))
        # Larger than at initialisation, for gates and steps that differ.
        for weight in (module.in_proj_b.weight, module.in_proj_a.weight, module.in_proj_z.weight):
            weight.mul_(8)
    return module


def _run(module: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, StateCache]:
    layer = DeltaLayer(dtype=dtype)
    sequence = StateSequence(
        {
            "qkv": module.in_proj_qkv(x), "z": module.in_proj_z(x),
            "beta_logits": module.in_proj_b(x), "decay_inputs": module.in_proj_a(x),
        }
    )  # fmt: skip
    step, inputs = build_step(layer, [Row(sequence, len(x), writes=1)])
    cache = layer.cache(2)
    out = gated_delta_rule(
        **inputs,
        conv_weight=module.conv1d.weight.squeeze(1),
        decay=-module.A_log.float().exp(),
        dt_bias=module.dt_bias,
        norm_weight=module.norm.weight,
        norm_eps=module.norm.variance_epsilon,
        num_key_heads=2,
        gate="silu",
        cache=cache,
        step=step,
    )
    return module.out_proj(out), cache


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 64, 150])
def test_delta_rule_whole_pass_matches_transformers(num_tokens: int) -> None:
    module, x = _module(torch.float32), randn(num_tokens, 64)
    assert_close(_run(module, x, torch.float32)[0], module(x[None])[0], 1e-5)


@torch.no_grad()
def test_delta_rule_bfloat16_is_as_exact_as_transformers() -> None:
    module, x = _module(torch.bfloat16), randn(150, 64, dtype=torch.bfloat16)
    ours, theirs = _run(module, x, torch.bfloat16)[0], module(x[None])[0]
    exact = module.float()(x[None].float())[0]
    ours_error, theirs_error = ((each - exact).square().mean().sqrt() for each in (ours, theirs))
    assert ours_error <= theirs_error


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_delta_rule_matches_both_rules_of_transformers(layer: DeltaLayer) -> None:
    qwen3_5 = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    inputs = layer.inputs(70, seed=1)
    sequence = StateSequence(inputs)
    cache = layer.cache(2)
    run_step(layer, cache, [Row(sequence, 70, writes=1)])
    given = _rule_inputs(layer, inputs)
    for rule in (qwen3_5.torch_recurrent_gated_delta_rule, qwen3_5.torch_chunk_gated_delta_rule):
        mixed, state = rule(**given, output_final_state=True, use_qk_l2norm_in_kernel=True)
        assert_close(sequence.output(), _gated(layer, mixed[0], inputs["z"]), 1e-5)
        assert cache.state is not None
        assert_close(cache.state[1], state[0], 1e-5)


def _rule_inputs(layer: DeltaLayer, inputs: Inputs) -> dict[str, Tensor]:
    weights = layer.weights()
    keys = layer.num_key_heads * layer.key_dim
    mixed = F.conv1d(
        inputs["qkv"].t(),
        weights["conv_weight"].unsqueeze(1),
        padding=layer.kernel_size - 1,
        groups=layer.channels,
    )[:, : len(inputs["qkv"])]
    sizes = (keys, keys, layer.num_heads * layer.value_dim)
    query, key, value = F.silu(mixed.t())[None].split(sizes, -1)
    return {
        "query": query.unflatten(-1, (layer.num_key_heads, -1)),
        "key": key.unflatten(-1, (layer.num_key_heads, -1)),
        "value": value.unflatten(-1, (layer.num_heads, -1)),
        "beta": inputs["beta_logits"].sigmoid()[None],
        "g": (weights["decay"] * F.softplus(inputs["decay_inputs"] + weights["dt_bias"]))[None],
    }


def _gated(layer: DeltaLayer, mixed: Tensor, z: Tensor) -> Tensor:
    """Return [T, H, V] normalised and gated, as [T, H * V]."""
    normed = F.rms_norm(mixed, (layer.value_dim,), layer.weights()["norm_weight"], 1e-6)
    gates = z.unflatten(-1, (-1, layer.value_dim))
    return (normed * (F.silu(gates) if layer.gate == "silu" else gates.sigmoid())).flatten(1)


@each_dtype
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 65, 131])
def test_delta_rule_shapes_match_the_reference(
    layer: DeltaLayer, num_tokens: int, dtype: torch.dtype, path: str
) -> None:
    """Token by token; test_state_kernels.py has sub-chunks, which round more, and longer rows."""
    if path == "triton" and num_tokens > 3:
        pytest.skip("the interpreter would take minutes")
    layer = replace(layer, dtype=dtype, is_invariant=True)
    sequence = StateSequence(layer.inputs(num_tokens, seed=1))
    step, inputs = build_step(layer, [Row(sequence, num_tokens, writes=1)])
    cache, expected_cache = layer.cache(2), layer.cache(2)
    out = layer.run(inputs, cache, step)
    assert out.dtype == dtype
    assert out.is_contiguous()
    expected = layer.reference(inputs, expected_cache, step)
    assert_close(out, expected, TOLERANCES[dtype])
    assert torch.equal(cache.ring[1], expected_cache.ring[1])
    assert cache.state is not None
    assert expected_cache.state is not None
    assert_close(cache.state[1], expected_cache.state[1], 1e-5)


def test_delta_rule_extreme_gates_stay_finite() -> None:
    layer = DeltaLayer()
    inputs = layer.inputs(12, seed=1)
    for name in ("z", "beta_logits", "decay_inputs"):
        inputs[name][::3], inputs[name][1::3] = 1e4, -1e4
    inputs["qkv"][::4], inputs["qkv"][1::4] = 0, -1e4
    sequence, cache = StateSequence(inputs), layer.cache(2)
    run_step(layer, cache, [Row(sequence, 12, writes=1)])
    assert sequence.output().isfinite().all()
    assert cache.state is not None
    assert cache.state[1].isfinite().all()


def test_delta_rule_accepts_a_transposed_weight() -> None:
    layer = DeltaLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(6, seed=1)), 6, writes=1)])
    weights = layer.weights()
    transposed = {**weights, "conv_weight": weights["conv_weight"].t().contiguous().t()}
    out, same = (
        gated_delta_rule(**inputs, **each, cache=layer.cache(2), step=step)
        for each in (weights, transposed)
    )
    assert torch.equal(out, same)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("qkv", _ones(5, 256, dtype=torch.int64), "qkv: must be"),
        ("qkv", _ones(256), r"qkv: must have shape \[any, any\]"),
        ("qkv", _ones(256, 5).t(), "qkv: the last dimension must be contiguous"),
        ("z", _ones(4, 160), r"z: must have shape \[5, any\]"),
        ("z", _ones(5, 161), r"z: must have shape \[any, 160\]"),
        ("z", _ones(5, 160).half(), r"z: must be torch\.float32"),
        ("beta_logits", _ones(4, 4), r"beta_logits: must have shape \[5, any\]"),
        ("decay_inputs", _ones(5, 3), r"decay_inputs: must have shape \[5, 4\]"),
        ("decay_inputs", _ones(4, 5).t(), "decay_inputs: the last dimension"),
        ("conv_weight", _ones(255, 4), r"conv_weight: must have shape \[256, any\]"),
        ("conv_weight", _ones(256, 0), "conv_weight: must have the channels"),
        ("conv_weight", _ones(256, 4).half(), r"conv_weight: must be torch\.float32"),
        ("decay", _ones(4).half(), r"decay: must be torch\.float32"),
        ("decay", _ones(5), r"decay: must have shape \[4\]"),
        ("dt_bias", _ones(8)[::2], "dt_bias: must be contiguous"),
        ("norm_weight", _ones(39), r"z: must have shape \[any, 156\]"),
        ("norm_weight", _ones(40, dtype=torch.int64), "norm_weight: must be"),
        ("num_key_heads", 3, "num_key_heads: must divide 4 heads"),
        ("num_key_heads", 0, "num_key_heads: must divide 4 heads"),
        ("gate", "gelu", "gate: must be silu or sigmoid"),
        ("cache", StateCache(_ones(2, 4, 256), None), r"cache\.state: must be given"),
        (
            "cache",
            StateCache(_ones(2, 4, 256), _ones(3, 4, 24, 40)),
            r"cache\.state: must have shape \[2, 4, 24, 40\]",
        ),
        (
            "cache",
            StateCache(_ones(2, 4, 256), _ones(2, 4, 24, 40).half()),
            r"cache\.state: must be torch\.float32",
        ),
        (
            "cache",
            StateCache(_ones(2, 4, 256), _ones(2, 4, 40, 24).mT),
            r"cache\.state: each block must be contiguous",
        ),
        (
            "cache",
            StateCache(_ones(2, 3, 256), _ones(2, 4, 24, 40)),
            r"cache\.ring: must have a row for each",
        ),
    ],
)
def test_delta_rule_wrong_arguments_are_named(name: str, wrong: Any, message: str) -> None:
    layer = DeltaLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(5, seed=1)), 5, writes=1)])
    arguments = {**inputs, **layer.weights(), "cache": layer.cache(2), "step": step}
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**{**arguments, name: wrong})
