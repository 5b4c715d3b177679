import pytest
import torch

from kernels.quantized.normed_rows import normed_rows
from kernels.quantized.rows import quantize_rows
from kernels.rms_norm import rms_norm
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, padded, randn

each_dtype = pytest.mark.parametrize(
    "dtype", [dtype for dtype in TOLERANCES if dtype != torch.float32], ids=str
)


pytestmark = pytest.mark.usefixtures("path")


@each_dtype
@pytest.mark.parametrize("adds", [False, True], ids=["alone", "added"])
@pytest.mark.parametrize("unit_offset", [False, True], ids=["weight", "1+weight"])
@pytest.mark.parametrize(
    ("size", "group", "is_static"),
    [(1, None, False), (300, None, False), (300, None, True), (384, 128, False), (48, 16, False)],
)
def test_codes_are_those_of_the_norm(
    size: int,
    group: int | None,
    is_static: bool,
    unit_offset: bool,
    adds: bool,
    dtype: torch.dtype,
) -> None:
    x, residual = (padded(randn(5, size, dtype=dtype, seed=seed)) for seed in (0, 1))
    weight = randn(size, dtype=dtype, seed=2)
    scale = torch.tensor([0.01], device=DEVICE) if is_static else None
    codes, scales, total = normed_rows(
        x,
        residual if adds else None,
        weight,
        1e-5,
        unit_offset=unit_offset,
        group=group,
        scale=scale,
    )
    assert torch.equal(total, x + residual if adds else x)
    normed = rms_norm(total, weight, 1e-5, unit_offset=unit_offset)
    expected, of_groups = quantize_rows(normed.view(-1, group or size), scale)
    assert_close(scales.flatten(), of_groups, tolerance=1e-3)
    # A sum in another order may round a value to the next 16-bit float, and that to the next FP8.
    assert codes.shape == normed.shape
    found = codes.view(torch.uint8).flatten().int()
    differs = (found - expected.view(torch.uint8).flatten().int()).abs()
    assert differs.max() <= 1
    assert differs.count_nonzero() <= 0.01 * differs.numel()


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, weight = randn(4, 80, dtype=torch.float16), randn(80, dtype=torch.float16)
    x[1, 3] = torch.nan
    codes, scales, _ = normed_rows(x, None, weight, 1e-5, unit_offset=False, group=None)
    assert codes.float().isnan().all(1).tolist() == [False, True, False, False]
    assert not codes[[0, 2, 3]].float().isnan().any()
    assert scales[[0, 2, 3]].isfinite().all()


def test_no_rows() -> None:
    x, weight = randn(0, 256, dtype=torch.float16), randn(256, dtype=torch.float16)
    codes, scales, total = normed_rows(x, x, weight, 1e-5, unit_offset=False, group=128)
    assert (codes.shape, scales.shape, total.shape) == ((0, 256), (0, 2), (0, 256))


def test_wrong_arguments_are_named() -> None:
    x, weight = randn(2, 80, dtype=torch.float16), randn(80, dtype=torch.float16)

    def run(*args: torch.Tensor | None, group: int | None = None) -> None:
        normed_rows(*args, 1e-5, unit_offset=False, group=group)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="x: must be"):
        run(x.float(), None, weight)
    with pytest.raises(ValueError, match="x: must have shape"):
        run(x[0], None, weight)
    with pytest.raises(ValueError, match="residual: must have shape"):
        run(x, x[:1], weight)
    with pytest.raises(ValueError, match="weight: must have shape"):
        run(x, None, weight[:40])
    with pytest.raises(ValueError, match="group: must be a power of 2"):
        run(x, None, weight, group=32)
