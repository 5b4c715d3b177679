import re
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits
from kernels.sampling.draw import sample_tokens
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

ROWS = 64


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _meta(torch.int32, *shape)


def _floats(*shape: int) -> Tensor:
    return _meta(torch.float32, *shape)


def _longs(*shape: int) -> Tensor:
    return _meta(torch.int64, *shape)


def _draw(vocab: int) -> tuple[Tensor, ...]:
    floats, ints = _floats(ROWS), _ints(ROWS)
    return _floats(ROWS, vocab), floats, ints, floats, floats, _longs(ROWS), ints, ints


@each_gpu
def test_draw(gpu: str) -> None:
    kernels = compile_call(gpu, sample_tokens, *_draw(128256))
    check(kernels)
    scan, shortlist, draw = kernels
    # Logits and maxima are accessed 16 bytes at a time: four accesses for 16 values per thread.
    assert len(re.findall(r"LDG\.E\S*\.128", scan.sass)) == 4
    assert len(re.findall(r"LDG\.E\S*\.128", shortlist.sass)) == 4
    # Programs of 512 threads have at most 128 registers each; a scan leaves room for others.
    assert draw.registers <= 128
    assert scan.registers <= 80


def test_draw_without_filters_launches_one_kernel_less() -> None:
    with_filters = compile_call("sm_90", sample_tokens, *_draw(32000))
    without = compile_call("sm_90", partial(sample_tokens, has_filters=False), *_draw(32000))
    scan, _, draw = [kernel.kernel for kernel in with_filters]
    assert [kernel.kernel for kernel in without] == [scan, draw]


@pytest.mark.parametrize("vocab", [1, 32003, 151936])
def test_draw_from_other_vocabularies(vocab: int) -> None:
    check(compile_call("sm_90", sample_tokens, *_draw(vocab)))


@each_gpu
def test_adjust_logits(gpu: str) -> None:
    counts = TokenCounts.allocate(256, 128256, torch.device("meta"))
    bias = LogitBias(_ints(ROWS + 1), _ints(4096), _floats(4096))
    asked = Penalties(_ints(ROWS), *(_floats(ROWS) for _ in range(3)))
    kernels = compile_call(gpu, adjust_logits, _floats(ROWS, 128256), bias, asked, counts)
    check(kernels)
    penalties = kernels[1].sass
    # Logits and counts of 16 tokens per thread.
    assert len(re.findall(r"LDG\.E\S*\.128", penalties)) == 8
    # Products are rounded before they are added or subtracted: nothing is fused. sm_100 adds two at
    # once.
    single, double = (len(re.findall(rf"\b{name}\b", penalties)) for name in ("FADD", "FADD2"))
    assert single + 2 * double >= 32


@each_gpu
def test_token_counts(gpu: str) -> None:
    counts = TokenCounts.allocate(256, 128256, torch.device("meta"))
    reset, mark = compile_call(
        gpu, mark_prompt, counts, _ints(ROWS), _ints(ROWS + 1), _ints(100_000)
    )
    (count,) = compile_call(gpu, count_output, counts, _ints(ROWS), _longs(ROWS))
    check([reset, mark, count])
    # Atomics do not return the previous value.
    assert re.search(r"\bRED\S*\.OR\b", mark.sass)
    assert re.search(r"\bRED\S*\.ADD\b", count.sass)


@each_gpu
@pytest.mark.parametrize(("vocab", "num_top"), [(128256, 0), (128256, 20), (151936, 32)])
def test_logprobs(vocab: int, num_top: int, gpu: str) -> None:
    check(compile_call(gpu, token_logprobs, _floats(ROWS, vocab), _longs(ROWS), num_top))
