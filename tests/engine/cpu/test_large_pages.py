from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch

from kernels.cpu import large_pages
from kernels.cpu.large_pages import LargePages, zeros_on_demand

MIB = 2**20


def is_mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_are_equal_aligned_and_apart(dtype: torch.dtype) -> None:
    pages = LargePages()
    shapes = [(0, 4), (7,), (3, 5, 7), (100, 1000), (1,)]
    originals = [(torch.rand(shape) * 100).to(dtype) for shape in shapes]
    copies = [pages.copy(original) for original in originals]
    for original, copy in zip(originals, copies, strict=True):
        assert torch.equal(copy, original)
        assert copy.dtype == dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0
        copy.zero_()  # nobody else's
        assert not copy.any()


def test_a_copy_of_strided_values() -> None:
    turned = torch.rand(40, 30).t()
    copy = LargePages().copy(turned)
    assert torch.equal(copy, turned)
    assert copy.is_contiguous()


def test_small_tensors_share_a_mapping_and_a_large_one_has_its_own() -> None:
    pages = LargePages()
    first = pages.copy(torch.ones(3 * MIB, dtype=torch.uint8))
    second = pages.copy(torch.ones(5, dtype=torch.uint8))
    assert second.data_ptr() == first.data_ptr() + 3 * MIB
    large = pages.copy(torch.ones(80 * MIB, dtype=torch.uint8))
    assert int(large.sum(dtype=torch.int64)) == 80 * MIB


def test_a_mapping_lives_as_long_as_a_tensor_in_it() -> None:
    pages = LargePages()
    tensors = [pages.copy(torch.full((1000,), i)) for i in range(3)]
    address = tensors[0].data_ptr()
    del pages, tensors[:2]
    gc.collect()
    assert is_mapped(address)
    assert (tensors[0] == 2).all()
    tensors.clear()
    gc.collect()
    assert not is_mapped(address)


def test_no_large_pages_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(large_pages.mmap, "mmap", Refusing)
    assert not zeros_on_demand(4).any()
    assert torch.equal(LargePages().copy(torch.ones(3)), torch.ones(3))
