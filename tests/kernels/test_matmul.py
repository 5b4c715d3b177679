import pytest
import torch
import torch.nn.functional as F

from kernels.matmul import matmul, reference
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn

# Rows, columns, depth: less than a tile of each dtype, whole tiles, several bands of them.
SHAPES = [(1, 1, 1), (3, 40, 33), (64, 64, 64), (129, 70, 130), (40, 200, 96)]
DEEP = (33, 80, 200)


def test_the_reference_is_torchs_own() -> None:
    x, weight, bias = randn(5, 33), randn(7, 33, seed=1), randn(7, seed=2)
    assert_close(reference(x, weight, bias), F.linear(x, weight, bias))
    assert_close(reference(x, weight, None), F.linear(x, weight))


@pytest.mark.usefixtures("path")
@each_dtype
@pytest.mark.parametrize("wide", [False, True], ids=["rounded", "wide"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(
    shape: tuple[int, int, int], with_bias: bool, wide: bool, dtype: torch.dtype
) -> None:
    rows, columns, depth = shape
    x, weight = padded(randn(rows, depth, dtype=dtype)), randn(columns, depth, dtype=dtype, seed=1)
    bias = randn(columns, dtype=dtype, seed=2) if with_bias else None
    out = matmul(x, weight, bias, wide=wide)
    assert out.dtype == (torch.float32 if wide else dtype)
    assert out.stride(1) == 1
    assert_close(out, reference(x, weight, bias))


@each_dtype
@pytest.mark.parametrize("num_rows", [1, 2, 31, 33])
def test_a_row_gets_the_same_bits_whatever_rows_there_are(
    num_rows: int, dtype: torch.dtype
) -> None:
    """Alone or with others, which may be anything, and at any place among them."""
    rows, columns, depth = DEEP
    x, weight = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype, seed=1)
    together = matmul(x, weight, None)
    for first in range(0, rows - num_rows + 1, 5):
        others = torch.cat([x[first : first + num_rows], 100 * randn(3, depth, dtype=dtype)])
        assert torch.equal(
            matmul(others, weight, None)[:num_rows], together[first : first + num_rows]
        )


def test_rows_of_the_result_begin_at_whole_vectors() -> None:
    out = matmul(randn(5, 8, dtype=torch.float16), randn(3, 8, dtype=torch.float16), None)
    assert out.data_ptr() % 16 == out.stride(0) * out.itemsize % 16 == 0


@pytest.mark.usefixtures("path")
def test_a_value_that_is_not_finite_stays_in_its_row() -> None:
    x, weight = randn(5, 33), randn(7, 33, seed=1)
    x[2, 3] = torch.nan
    found = matmul(x, weight, None).isnan()
    assert found[2].all()
    assert found.sum() == 7


@pytest.mark.usefixtures("path")
def test_no_rows() -> None:
    assert matmul(randn(0, 8), randn(5, 8), None).shape == (0, 5)


def test_wrong_arguments_are_named() -> None:
    x, weight, bias = randn(2, 8), randn(4, 8), randn(4)
    with pytest.raises(ValueError, match="x: must be"):
        matmul(x.int(), weight, None)
    with pytest.raises(ValueError, match="x: must have shape"):
        matmul(x[0], weight, None)
    with pytest.raises(ValueError, match="x: the last dimension must be contiguous"):
        matmul(x.t(), weight[:, :2], None)
    with pytest.raises(ValueError, match=r"weight: must have shape"):
        matmul(x, weight[:, :4], None)
    with pytest.raises(ValueError, match=r"weight: must be torch\.float32"):
        matmul(x, weight.half(), None)
    with pytest.raises(ValueError, match="weight: must be contiguous"):
        matmul(randn(2, 4), weight.t()[:, :4].t()[:4, :4].t(), None)
    with pytest.raises(ValueError, match="weight: must not be empty"):
        matmul(x, weight[:0], None)
    with pytest.raises(ValueError, match=r"bias: must have shape \[4\]"):
        matmul(x, weight, bias[:3])
    with pytest.raises(ValueError, match="bias: must be"):
        matmul(x, weight, bias.half())
    with pytest.raises(ValueError, match="bias: must be on"):
        matmul(x, weight, bias.to("meta" if DEVICE.type == "cpu" else "cpu"))
