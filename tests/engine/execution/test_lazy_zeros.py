import gc
import mmap

import pytest
import torch

from engine.execution import lazy_zeros
from engine.execution.lazy_zeros import zeroed_on_demand


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_zeros_of_any_type_that_can_be_written(dtype: torch.dtype) -> None:
    tensor = zeroed_on_demand((3, 5, 7), dtype=dtype)
    assert tensor.shape == (3, 5, 7)
    assert tensor.dtype == dtype
    assert not tensor.float().any()
    tensor[2, 4] = torch.ones(7).to(dtype)
    assert tensor.float().sum() == 7


def test_the_memory_lives_as_long_as_a_part_of_it() -> None:
    rows = [zeroed_on_demand((1000, 100), dtype=torch.float32)[999] for _ in range(20)]
    for i, row in enumerate(rows):
        row.fill_(i)
    gc.collect()
    assert all((row == i).all() for i, row in enumerate(rows))


def test_no_large_pages_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(lazy_zeros.mmap, "mmap", Refusing)
    assert not zeroed_on_demand((4,), dtype=torch.float32).any()
