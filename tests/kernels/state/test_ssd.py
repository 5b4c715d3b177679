from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state.ssd import ssd
from tests.kernels.state.state_cases import Row, SSDLayer, StateSequence, build_step, run_step
from tests.kernels.support import assert_close

LAYERS = [
    SSDLayer(),
    SSDLayer(num_heads=6, num_groups=1, state_size=16, head_dim=8, kernel_size=2, bias=False),
    SSDLayer(num_groups=4, state_size=128, head_dim=64, ring_size=6),
    SSDLayer(dt_limits=(0.05, 0.8)),
    SSDLayer(num_heads=1, num_groups=1, state_size=1, head_dim=1, kernel_size=1, ring_size=1),
]


def _expected(layer: SSDLayer, inputs: dict[str, Tensor]) -> Tensor:
    """Return what transformers gives for a whole sequence, [T, H * V]."""
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    weights, num_tokens = layer.weights(), len(inputs["inputs"])
    padded = F.pad(inputs["inputs"].t()[None], (layer.kernel_size - 1, 0))
    taps = weights["conv_weight"][:, None]
    mixed = F.silu(F.conv1d(padded, taps, weights["conv_bias"], groups=layer.channels)[0].t())
    sizes = [layer.num_heads * layer.head_dim, *[layer.num_groups * layer.state_size] * 2]
    x, b, c = mixed.split(sizes, dim=-1)
    groups = (1, num_tokens, layer.num_groups, layer.state_size)
    out = mamba2.mamba2_chunk_scan(
        x.reshape(1, num_tokens, layer.num_heads, layer.head_dim),
        inputs["time_steps"][None],
        weights["decay"],
        b.reshape(groups),
        c.reshape(groups),
        chunk_size=16,
        D=weights["skip"],
        dt_bias=weights["dt_bias"],
        dt_softplus=True,
        dt_limit=layer.dt_limits,
    )
    return out.reshape(num_tokens, -1)


@pytest.mark.parametrize("num_tokens", [1, 63, 150])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_ssd_whole_pass_matches_transformers(layer: SSDLayer, num_tokens: int) -> None:
    sequence = StateSequence(layer.inputs(num_tokens, seed=1))
    run_step(layer, layer.cache(2), [Row(sequence, num_tokens, writes=1)])
    assert_close(sequence.output(), _expected(layer, sequence.inputs), 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 3, 65, 131])
def test_ssd_shapes_match_the_reference(
    layer: SSDLayer, num_tokens: int, dtype: torch.dtype
) -> None:
    layer = replace(layer, dtype=dtype)
    sequence = StateSequence(layer.inputs(num_tokens, seed=1))
    step, inputs = build_step(layer, [Row(sequence, num_tokens, writes=1)])
    cache, expected_cache = layer.cache(2), layer.cache(2)
    out = layer.run(inputs, cache, step)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    assert_close(out, layer.reference(inputs, expected_cache, step), 1e-5)
    assert torch.equal(cache.ring[1], expected_cache.ring[1])
    assert cache.state is not None
    assert expected_cache.state is not None
    assert_close(cache.state[1], expected_cache.state[1], 1e-5)


def test_ssd_extreme_inputs_stay_finite() -> None:
    layer = SSDLayer()
    inputs = layer.inputs(12, seed=1)
    inputs["time_steps"][::3], inputs["time_steps"][1::3] = 1e4, -1e4
    inputs["inputs"][::4], inputs["inputs"][1::4] = 0, -1e4
    sequence, cache = StateSequence(inputs), layer.cache(2)
    run_step(layer, cache, [Row(sequence, 12, writes=1)])
    assert sequence.output().isfinite().all()
    assert cache.state is not None
    assert cache.state[1].isfinite().all()


def test_ssd_accepts_a_transposed_weight() -> None:
    layer = SSDLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(6, seed=1)), 6, writes=1)])
    weights = layer.weights()
    transposed = {**weights, "conv_weight": weights["conv_weight"].t().contiguous().t()}
    out, same = (
        ssd(**inputs, **each, cache=layer.cache(2), step=step) for each in (weights, transposed)
    )
    assert torch.equal(out, same)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups: must divide 4 heads"),
        ({"num_groups": 1}, "inputs: must have 4 x 40"),
        ({"skip": torch.zeros(3)}, r"skip: must have shape \[4\]"),
        ({"decay": torch.zeros(4, dtype=torch.float64)}, r"decay: must be torch\.float32"),
        ({"conv_bias": torch.zeros(7)}, "conv_bias: must have shape"),
        ({"dt_bias": torch.zeros(4, dtype=torch.int32)}, "dt_bias: must be"),
        ({"skip": torch.zeros(8)[::2]}, "skip: must be contiguous"),
    ],
)
def test_ssd_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    layer = SSDLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(5, seed=1)), 5, writes=1)])
    with pytest.raises(ValueError, match=message):
        ssd(**inputs, **{**layer.weights(), **change}, cache=layer.cache(2), step=step)
