"""Sums over ranks, for the hidden sizes of real models."""

import re

import pytest
import torch
from torch import Tensor

from kernels.collectives.peers import PROGRAMS, Peers
from kernels.collectives.rank_sum import rank_sum, rank_sum_norm
from kernels.rms_norm import rms_norm_add
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import Compiled, compile_call

each_row = pytest.mark.parametrize(
    ("size", "dtype"),
    [(896, torch.bfloat16), (4096, torch.bfloat16), (4096, torch.float32)],
    ids=str,
)
each_number = pytest.mark.parametrize("ranks", [2, 8])


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _peers(size: int) -> Peers:
    addresses = _empty(size, dtype=torch.int64)
    counts, aborted = (_empty(length, dtype=torch.int32) for length in (PROGRAMS, 1))
    return Peers(1, size, addresses, addresses, counts, aborted)


def _check_memory(kernel: Compiled, ranks: int, meetings: int) -> None:
    """Assert that data move 16 bytes at a time, and that each acquire forgets cached lines."""
    assert kernel.sass.count("STG.E.128") == kernel.sass.count("STG.E") - 1  # that of the count
    assert kernel.sass.count("LDG.E.128") >= ranks + 1
    for instruction in ("ATOMG.E.EXCH.STRONG.SYS", "ATOMG.E.ADD.STRONG.SYS", "CCTL.IVALL"):
        assert kernel.sass.count(instruction) == meetings
    assert kernel.sass.count("MEMBAR") == meetings


def _layout(kernel: Compiled) -> str:
    """Return which thread has which values of a row when it is reduced."""
    (name,) = re.findall(r"\}\) : \(tensor<\w+xf32, (#\w+)>\)", kernel.ttgir)
    (layout,) = re.findall(rf"^{name} = (.*)$", kernel.ttgir, re.MULTILINE)
    return str(layout)


@each_gpu
@each_number
@each_row
def test_sum_moves_whole_vectors(size: int, dtype: torch.dtype, ranks: int, gpu: str) -> None:
    (kernel,) = found = compile_call(gpu, rank_sum, _empty(64, size, dtype=dtype), _peers(ranks))
    check(found)
    _check_memory(kernel, ranks, meetings=2)


@each_gpu
@each_number
@each_row
def test_norm_of_a_sum_adds_squares_as_the_norm_alone_does(
    size: int, dtype: torch.dtype, ranks: int, gpu: str
) -> None:
    x = _empty(64, size, dtype=dtype)
    (kernel,) = found = compile_call(
        gpu, rank_sum_norm, x, x, x[0], 1e-5, _peers(ranks), unit_offset=False
    )
    check(found)
    _check_memory(kernel, ranks, meetings=1)
    (alone,) = compile_call(gpu, rms_norm_add, x, x, x[0], 1e-5)
    assert _layout(kernel) == _layout(alone)
    assert kernel.num_warps == alone.num_warps
    assert "FFMA" not in kernel.sass + alone.sass  # which might be there in one of them alone


@pytest.mark.parametrize("size", [128, 2560, 8192])
def test_norm_of_a_sum_of_short_and_long_rows_fits(size: int) -> None:
    x = _empty(16, size, dtype=torch.bfloat16)
    check(compile_call("sm_90", rank_sum_norm, x, x, x[0], 1e-5, _peers(8), unit_offset=True))


def test_sum_of_any_number_of_rows_runs_the_same_code() -> None:
    codes = set()
    for rows in (1, 2, 16, 33):
        x = _empty(rows, 896, dtype=torch.bfloat16)
        for is_two_shot in (False, True):
            (kernel,) = compile_call("sm_90", rank_sum, x, _peers(4), is_two_shot=is_two_shot)
            codes.add(kernel.cubin)
    assert len(codes) == 1
