"""Argument checks that the kernel wrappers share: `ValueError`s that name the argument."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise unless `tensor` has `shape`, in which None stands for any size."""
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and size != want for size, want in zip(found, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: must have shape [{wanted}] (got {list(found)})")


def check_float(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` holds float32, bfloat16 or float16."""
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: must be float32, bfloat16 or float16 (got {tensor.dtype})")


def check_index(name: str, tensor: Tensor) -> None:
    """Raise unless `tensor` holds int64 indices."""
    if tensor.dtype != torch.int64:
        raise ValueError(f"{name}: must be int64 (got {tensor.dtype})")


def check_like(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless `tensor` has the dtype and the device of `other`."""
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: must be {other.dtype} as {other_name} is (got {tensor.dtype})")
    check_device(name, tensor, other_name, other)


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise unless `tensor` lies on the device of `other`."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name}: must be on {other.device} as {other_name} is (got {tensor.device})"
        )
