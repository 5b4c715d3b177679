"""The integers of GGUF's blocks, as products on a GPU take them."""

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the engine is not installed here")

import gguf

from engine.quantization.gguf import GgufBlocks
from kernels.quantized.codes import pack
from kernels.quantized.wna16_gemm import wna16_linear
from tests.factories.gguf_files import random_blocks
from tests.kernels.support import DEVICE, assert_close, randn


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0"])
def test_products_are_those_of_the_weights(kind: str) -> None:
    name = gguf.GGMLQuantizationType[kind]
    blocks = torch.from_numpy(random_blocks((24, 512), name, np.random.default_rng(0)))
    fmt = GgufBlocks(kind)
    assert fmt.stays_on_gpu(24, 512)
    tensors = {"weight": blocks.to(DEVICE)}
    stored = fmt.for_gpu(tensors)
    assert stored is not None
    integers = fmt.integers(tensors)
    assert integers is not None
    weight = pack(*stored[:5])
    for rows in (3, 70):
        x = randn(rows, 512, dtype=torch.float16)
        expected = x.float() @ integers.dequantized().t()
        # Offsets are rounded to float16; weights that they nearly cancel would be to bfloat16.
        assert_close(wna16_linear(x, weight, None), expected, 4e-3)
