"""Which errors say that there is no memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.errors import StepOutOfMemoryError
from engine.execution.memory.step_memory import is_out_of_memory, with_memory
from tests.factories.sampling import EMPTY

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("std::bad_alloc"),
    ],
    ids=str,
)
def test_what_libraries_say(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)"),
        ValueError("max_tokens: 5 tokens, and I am out of memory"),
    ],
    ids=str,
)
def test_other_errors_pass(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        with_memory(EMPTY, CUDA, fail)
    assert raised.value is error


@pytest.mark.parametrize("allocate", [np.empty, torch.empty])
def test_what_comes_on_a_cpu(allocate: type) -> None:
    with pytest.raises(StepOutOfMemoryError, match=r"on cpu .* lower kv_cache_memory_bytes") as at:
        with_memory(EMPTY, CPU, lambda: allocate(2**52))
    assert at.value.__context__ is None


def test_on_a_gpu_the_share_of_its_memory_is_named() -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with pytest.raises(StepOutOfMemoryError, match=r"2\.00 GiB\.\); lower gpu_memory_utilization"):
        with_memory(EMPTY, CUDA, fail)
