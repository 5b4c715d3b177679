"""Which tiles prefill attention takes."""

import pytest
import torch

from kernels.attention.paged_prefill_tiles import settings
from kernels.device import HOPPER
from kernels.e4m3 import FP8


@pytest.mark.parametrize(
    ("tokens", "sequences", "cache", "rows"),
    [
        (8192, 1, torch.bfloat16, 128),
        (2048, 1, torch.bfloat16, 128),
        (8192, 8, torch.bfloat16, 64),  # chunks of 1,024 tokens
        (8192, 8, FP8, 128),
        (64, 1, torch.bfloat16, 64),  # too few to occupy the GPU
    ],
)
def test_long_chunks_have_large_tiles(
    tokens: int, sequences: int, cache: torch.dtype, rows: int
) -> None:
    tile = settings(4 * tokens, sequences, 8, 128, torch.bfloat16, cache, HOPPER)
    assert tile["BLOCK_M"] == rows
    fixed = settings(4 * tokens, sequences, 8, 128, torch.bfloat16, cache, HOPPER, is_fixed=True)
    assert fixed["BLOCK_M"] == 64
