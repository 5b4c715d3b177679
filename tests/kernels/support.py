"""Shared by kernel tests: implementations, dtypes, and comparison of results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import cpu, device
from kernels.device import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")

# Relative RMS error due to rounding to a dtype. The interpreter computes bfloat16 wrongly.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 1e-3}
if DEVICE.type == "cuda":
    TOLERANCES[torch.bfloat16] = 8e-3

each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def take_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the wrappers use one implementation: "triton", "torch", or "cpu" for C++."""
    monkeypatch.setattr(device, "runs_triton", lambda _: path == "triton")
    if path == "torch":
        monkeypatch.setattr(cpu, "fast_operations", lambda _: None)
    if path == "cpu" and cpu.operations(torch.zeros((), device=DEVICE)) is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return normal random numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def padded(tensor: Tensor) -> Tensor:
    """Return equal values in strided rows, with poison between them."""
    wide = poison(
        torch.empty(
            *tensor.shape[:-1], tensor.shape[-1] + 16, dtype=tensor.dtype, device=tensor.device
        )
    )
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def poison(tensor: Tensor) -> Tensor:
    """Fill with values that must never be read: NaN, or a number far out of range."""
    if tensor.device.type == "meta":
        return tensor
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """Assert that the relative RMS error is within `tolerance`, by default that of the dtype.

    NaN is not allowed, and no single value may differ by more than 64 times the tolerance, in
    units of the RMS of `expected`.
    """
    tolerance = TOLERANCES[actual.dtype] if tolerance is None else tolerance
    assert actual.shape == expected.shape
    if not actual.numel():
        return
    difference = (actual.double() - expected.double()).abs()
    assert not difference.isnan().any(), "NaN"
    size = max(expected.double().square().mean().sqrt().item(), 1e-12)
    error = difference.square().mean().sqrt().item() / size
    assert error <= tolerance, f"relative RMS error {error:.2e} > {tolerance:.0e}"
    worst = difference.max().item() / size
    assert worst <= 64 * tolerance, f"largest error {worst:.2e} > 64 * {tolerance:.0e}"
