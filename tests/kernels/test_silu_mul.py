import pytest
import torch

from kernels.silu_mul import silu_mul


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
    ids=str,
)
@pytest.mark.parametrize("inner", [1, 31, 64])
def test_matches_the_formula(inner: int, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up = (torch.randn(7, 2 * inner, generator=generator) * 4).to(dtype)
    gate, up = gate_up[:, :inner].double(), gate_up[:, inner:].double()
    out = silu_mul(gate_up)
    assert out.dtype == dtype
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="gate_up: the last dimension must be even"):
        silu_mul(torch.ones(2, 3))
    with pytest.raises(ValueError, match="gate_up: must be"):
        silu_mul(torch.ones(2, 4, dtype=torch.int32))
