import pytest
import torch
from torch import Tensor

from kernels.rms_norm import rms_norm, rms_norm_add


def _oracle(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (3, 2, 100)], ids=str)
def test_matches_the_formula(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype) * 3
    weight = torch.randn(shape[-1], generator=generator).to(dtype)
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), _oracle(x, weight, 1e-5), rtol=tolerance, atol=tolerance
    )


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 8), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones_like(x))


def test_fused_addition_returns_the_sum_and_its_norm_and_changes_nothing() -> None:
    x, residual, weight = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    before = x.clone(), residual.clone()
    normed, total = rms_norm_add(x, residual, weight, 1e-5)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, rms_norm(x + residual, weight, 1e-5), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "residual", "weight", "message"),
    [
        (torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4), torch.ones(4), "x: must be"),
        (torch.ones(2, 4), torch.ones(2, 4), torch.ones(5), r"weight: must have shape \[4\]"),
        (torch.ones(2, 4), torch.ones(2, 4), torch.ones(4).half(), "weight: must be torch.float32"),
        (torch.ones(2, 4), torch.ones(1, 4), torch.ones(4), r"residual: must have shape \[2, 4\]"),
        (torch.ones(2, 4), torch.ones(2, 4).half(), torch.ones(4), "residual: must be"),
        (torch.ones(2, 4), torch.ones(2, 4, device="meta"), torch.ones(4), "residual: .* cpu"),
    ],
)
def test_wrong_arguments_are_named(
    x: Tensor, residual: Tensor, weight: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rms_norm_add(x, residual, weight, 1e-5)
