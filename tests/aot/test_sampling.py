import re
from functools import partial

import pytest
import torch
from torch import Tensor

from kernels.sampling.adjust_logits import RowMasks, adjust_logits
from kernels.sampling.draw import sample_tokens
from kernels.sampling.logprobs import token_logprobs
from kernels.sampling.token_counts import TokenCounts, count_tokens
from kernels.sampling.truncate import truncate_logits
from kernels.step.seq_slot_tables import SeqSlotTables
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


def _tables(vocab: int) -> SeqSlotTables:
    return SeqSlotTables.allocate(
        256,
        max_model_len=32768,
        max_blocks=2048,
        max_stop_token_ids=16,
        max_biases=1024,
        vocab_size=vocab,
        device=torch.device("meta"),
    )


def _draw(vocab: int) -> tuple[Tensor, SeqSlotTables, Tensor]:
    return _floats(ROWS, vocab), _tables(vocab), _ints(ROWS)


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
@pytest.mark.parametrize("has_masks", [False, True])
def test_adjust_logits(has_masks: bool, gpu: str) -> None:
    counts = TokenCounts.allocate(256, 128256, torch.device("meta"))
    masks = RowMasks(_ints(ROWS), _ints(9, 128256 // 32)) if has_masks else None
    kernels = compile_call(gpu, adjust_logits, *_draw(128256), counts, masks)
    check(kernels)
    code = kernels[0].sass
    # Logits and counts of 16 tokens per thread.
    assert len(re.findall(r"LDG\.E\S*\.128", code)) == 8
    # Products are rounded before they are added or subtracted: nothing is fused. sm_100 adds two at
    # once.
    single, double = (len(re.findall(rf"\b{name}\b", code)) for name in ("FADD", "FADD2"))
    assert single + 2 * double >= 32


@each_gpu
@pytest.mark.parametrize("vocab", [128256, 32003])
def test_truncate(vocab: int, gpu: str) -> None:
    check(compile_call(gpu, truncate_logits, *_draw(vocab)))


@each_gpu
def test_token_counts(gpu: str) -> None:
    counts = TokenCounts.allocate(256, 128256, torch.device("meta"))
    (count,) = compile_call(gpu, count_tokens, counts, _tables(128256), _ints(ROWS))
    check([count])
    # Atomics do not return the previous value.
    assert re.search(r"\bRED\S*\.OR\b", count.sass)
    assert re.search(r"\bRED\S*\.ADD\b", count.sass)


@each_gpu
@pytest.mark.parametrize(("vocab", "num_top"), [(128256, 0), (128256, 20), (151936, 32)])
def test_logprobs(vocab: int, num_top: int, gpu: str) -> None:
    check(compile_call(gpu, token_logprobs, _floats(ROWS, vocab), _longs(ROWS), num_top))
