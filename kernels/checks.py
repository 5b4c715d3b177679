"""Argument checks that the kernel wrappers share: `ValueError`s that name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless `tensor` has `shape`, in which None stands for any size."""
    found = tensor.shape
    if len(found) == len(shape):
        for size, want in zip(found, shape, strict=True):
            if size != want and want is not None:
                break
        else:
            return
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(f"{name}: must have shape [{wanted}] (got {list(found)})")


def check_dtype(name: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise unless the dtype of `tensor` is one of `allowed`."""
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: must be {wanted} (got {tensor.dtype})")


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise ValueError(f"{name}: must be on {device} (got {tensor.device})")


def check_like(name: str, tensor: Tensor, other: Tensor) -> None:
    """Raise unless `tensor` has the dtype and the device of `other`."""
    check_dtype(name, tensor, other.dtype)
    check_device(name, tensor, other.device)


def check_last_stride(name: str, tensor: Tensor) -> None:
    """Raise unless the last dimension of `tensor` is contiguous, as vectorised loads require."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name}: the last dimension must be contiguous (got strides {list(tensor.stride())})"
        )


def check_contiguous(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` is contiguous; results written to a copy would be lost."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous (got strides {list(tensor.stride())})")


def check_output(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raise unless a result of `shape` and `dtype` on `device` can be written to `tensor`."""
    check_shape(name, tensor, shape)
    check_dtype(name, tensor, dtype)
    check_device(name, tensor, device)
    check_contiguous(name, tensor)
