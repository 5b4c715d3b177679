"""Logits on a GPU are as exact as float32, for a vocabulary of any size."""

from __future__ import annotations

import pytest
import torch

from engine.execution.devices import require_full_precision
from engine.layers.vocabulary import LMHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("vocab", [50257, 32000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@torch.inference_mode()
def test_logits_are_not_rounded_to_the_type_of_the_weights(
    dtype: torch.dtype, vocab: int, rows: int
) -> None:
    require_full_precision()
    cuda = torch.device("cuda")
    generator = torch.Generator(cuda).manual_seed(0)
    head = LMHead(vocab, 4096, dtype=dtype, device=cuda)
    head.rows.normal_(0.0, 1 / 64, generator=generator)
    hidden = torch.randn(rows, 4096, dtype=dtype, device=cuda, generator=generator)
    logits = head(hidden)
    assert logits.shape == (rows, vocab)
    assert logits.dtype == torch.float32
    exact = hidden.double() @ head.rows.double().t()
    # Of the size of 1. Rounding to float16 would be off by 2e-4, to bfloat16 by 2e-3; the sums of
    # 4096 products in Hopper's matrix units are by 5e-6.
    assert (logits - exact).square().mean().sqrt() < 1e-5
