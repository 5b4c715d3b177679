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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_groups": 3}, "num_groups: must divide 4 heads"),
        ({"num_groups": 1}, "inputs: must have 4 x 40"),
        ({"skip": torch.zeros(3)}, r"skip: must have shape \[4\]"),
        ({"decay": torch.zeros(4, dtype=torch.float64)}, r"decay: must be torch\.float32"),
        ({"conv_bias": torch.zeros(7)}, "conv_bias: must have shape"),
        ({"dt_bias": torch.zeros(4, dtype=torch.int32)}, "dt_bias: must be"),
    ],
)
def test_ssd_wrong_arguments_are_named(change: dict[str, Any], message: str) -> None:
    layer = SSDLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(5, seed=1)), 5, writes=1)])
    with pytest.raises(ValueError, match=message):
        ssd(**inputs, **{**layer.weights(), **change}, cache=layer.cache(2), step=step)
