"""The product of one row with a weight, and its gated activation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels import device
from kernels.cpu.activation import ACTIVATIONS, Activation
from kernels.gated_activation import gated_activation
from kernels.gemv import gated_linear, linear, reference, settings
from tests.kernels.support import assert_close, each_dtype, padded, randn

# Columns and depth: none fills a tile, or all do; beyond one block of the depth.
SHAPES = [(1, 1), (3, 40), (40, 7), (130, 96), (64, 2048), (9, 2500)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])


def _arguments(
    columns: int, depth: int, dtype: torch.dtype, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    x = padded(randn(1, depth, dtype=dtype))
    weight = randn(columns, depth, dtype=dtype, seed=1) / depth**0.5
    return x, weight, randn(columns, dtype=dtype, seed=2) if has_bias else None


def test_the_reference_is_the_product_and_its_gated_activation() -> None:
    x, weight, bias = randn(1, 9), randn(6, 9, seed=1), randn(6, seed=2)
    product = torch.tensor([[(row * x[0]).sum() + b for row, b in zip(weight, bias, strict=True)]])
    assert_close(reference(x, weight, bias).cpu(), product)
    gated = F.silu(product[:, :3]) * product[:, 3:]
    assert_close(reference(x, weight, bias, "silu").cpu(), gated)


@each_dtype
@each_bias
@each_shape
def test_linear(shape: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = _arguments(*shape, dtype, has_bias)
    out = linear(x, weight, bias)
    assert out.dtype == dtype
    assert out.is_contiguous()
    assert_close(out, reference(x, weight, bias))


@each_dtype
@each_bias
@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_shape
def test_gated_linear(
    shape: tuple[int, int], activation: Activation, has_bias: bool, dtype: torch.dtype
) -> None:
    columns, depth = shape
    x, weight, bias = _arguments(2 * columns, depth, dtype, has_bias)
    out = gated_linear(x, weight, bias, activation)
    assert out.shape == (1, columns)
    assert_close(out, reference(x, weight, bias, activation))


@each_dtype
@pytest.mark.parametrize("num_rows", [0, 2, 5])
def test_other_numbers_of_rows_are_torchs(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, 24, dtype=dtype), randn(10, 24, dtype=dtype, seed=1)
    assert torch.equal(linear(x, weight, None), F.linear(x, weight))
    expected = gated_activation(F.linear(x, weight), "silu")
    assert torch.equal(gated_linear(x, weight, None, "silu"), expected)


def test_what_is_not_finite_stays_in_its_output() -> None:
    x, weight = randn(1, 40), randn(12, 40, seed=1)
    weight[3, 7] = torch.nan
    assert linear(x, weight, None).isnan().nonzero().tolist() == [[0, 3]]
    assert gated_linear(x, weight, None, "silu").isnan().nonzero().tolist() == [[0, 3]]


def test_what_does_not_go_together_is_refused_as_by_torch() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        linear(randn(1, 8), randn(4, 9), None)
    with pytest.raises(RuntimeError, match="dtype"):
        linear(randn(1, 8), randn(4, 8, dtype=torch.float16), None)


def test_a_thread_has_16_bytes_of_the_weight_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "INTERPRETED", False)
    assert settings(4864) == {"BLOCK_N": 1, "BLOCK_K": 1024, "num_warps": 4}
    assert settings(896) == {"BLOCK_N": 1, "BLOCK_K": 1024, "num_warps": 4}
    assert settings(14336) == {"BLOCK_N": 1, "BLOCK_K": 2048, "num_warps": 8}
    assert settings(8) == {"BLOCK_N": 1, "BLOCK_K": 8, "num_warps": 1}
