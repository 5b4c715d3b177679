"""The arrays of a step, which all state layers check alike."""

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
        ("query_start_loc", _zeros(2), r"step\.query_start_loc: must have shape \[3\]"),
        ("seq_lens", _zeros(2, 1), r"step\.seq_lens: must have shape \[any\]"),
        ("reads", _zeros(2, dtype=torch.int64), r"step\.reads: must be torch\.int32"),
        ("writes", _zeros(2).to("meta"), r"step\.writes: must be on"),
        ("saves", _zeros(2, 4), r"step\.saves: must have shape \[2, any, 2\]"),
        ("saves", _zeros(2, 2, 2).mT, r"step\.saves: must be contiguous"),
    ],
)
def test_step_states_wrong_arrays_are_named(name: str, wrong: Tensor, message: str) -> None:
    layer = ConvLayer()
    sequence = StateSequence(layer.inputs(5, seed=1))
    step, inputs = build_step(layer, [Row(sequence, 5, writes=1), Row(None, 2)])
    with pytest.raises(ValueError, match=message):
        layer.run(inputs, layer.cache(2), replace(step, **{name: wrong}))
