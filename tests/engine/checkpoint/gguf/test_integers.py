"""The integers of GGUF's blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.reader import block_size
from engine.layers.integer_weight import IntegerKind
from engine.quantization.gguf import GgufBlocks
from tests.factories.gguf_files import random_blocks


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K"])
def test_the_integers_of_blocks(kind: str) -> None:
    num_elements, _ = block_size(kind)
    draw = np.random.default_rng(0)
    blocks = random_blocks((6, 3 * num_elements), gguf.GGMLQuantizationType[kind], draw)
    weight = GgufBlocks(kind).integers({"weight": torch.from_numpy(blocks)})
    assert weight is not None
    assert weight.group_size == 32
    assert int(weight.steps.max()) < 2**weight.bits
    assert (weight.offset is None) == (kind in {"Q4_0", "Q5_0", "Q8_0"})
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    torch.testing.assert_close(weight.dequantized(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_other_blocks_are_rounded_to_8_bits(kind: str) -> None:
    num_elements, _ = block_size(kind)
    draw = np.random.default_rng(0)
    blocks = random_blocks((6, 3 * num_elements), gguf.GGMLQuantizationType[kind], draw)
    weight = GgufBlocks(kind).integers({"weight": torch.from_numpy(blocks)})
    assert weight is not None
    assert weight.kind == IntegerKind(8, 32) == GgufBlocks(kind).integer_kind(3 * num_elements)
    exact = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    largest = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, 1)
    # Half a step, which is rounded to float16.
    assert ((weight.dequantized() - exact).abs() <= largest / 127 * (0.5 + 2**-4)).all()
