"""The arrays of a step, alike for all state layers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.kernels.state.state_cases import ConvLayer, Row, StateSequence, build_step
from tests.kernels.support import DEVICE


def _zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query_start_loc", _zeros(2), r"query_start_loc: must have shape \[3\]"),
        ("seq_lens", _zeros(2, 1), r"seq_lens: must have shape \[any\]"),
        ("reads", _zeros(2, dtype=torch.int64), r"reads: must be torch\.int32"),
        ("writes", _zeros(2).to("meta"), r"writes: must be on"),
        ("saves", _zeros(2, 4), r"saves: must have shape \[2, any, 2\]"),
        ("saves", _zeros(2, 2, 2).mT, r"saves: must be contiguous"),
    ],
)
def test_step_states_wrong_arrays_are_named(name: str, wrong: Tensor, message: str) -> None:
    layer = ConvLayer()
    sequence = StateSequence(layer.inputs(5, seed=1))
    step, _ = build_step(layer, [Row(sequence, 5, writes=1), Row(None, 2)])
    with pytest.raises(ValueError, match=message):
        replace(step, **{name: wrong})


def test_step_states_elsewhere_are_refused() -> None:
    layer = ConvLayer()
    step, inputs = build_step(layer, [Row(StateSequence(layer.inputs(5, seed=1)), 5, writes=1)])
    arrays = ("query_start_loc", "seq_lens", "reads", "writes", "saves")
    elsewhere = replace(step, **{name: getattr(step, name).to("meta") for name in arrays})
    with pytest.raises(ValueError, match="step: must be on"):
        layer.run(inputs, layer.cache(2), elsewhere)
