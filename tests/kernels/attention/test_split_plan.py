from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.attention.split_plan import (
    FAN_IN,
    STEP,
    SplitPlan,
    num_work_items,
    plan_splits,
    reference,
)
from tests.kernels.support import DEVICE


def lens(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def check(plan: SplitPlan, lengths: list[int], window: int | None) -> None:
    """Assert that `plan` covers every visible key once, with the smallest possible splits."""
    items = plan.work_items.tolist()
    used = [item for item in items if item[0] >= 0]
    assert items == used + [[-1, 0, 0, 0, 0]] * (len(items) - len(used))
    assert plan.num_sequences == len(lengths)
    assert not plan.arrivals.any()
    starts = [max(0, length - (window or length)) for length in lengths]
    sizes = {end - start for _, start, end, first, count in used if count > 1}
    split_size = max(sizes, default=None)
    at = 0
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        first, count = at, used[at][4]
        assert 1 <= count <= FAN_IN**2
        for _ in range(count):
            end = min(start + split_size, length) if count > 1 else length
            assert used[at] == [row, start, end, first, count]
            assert end > start or length == 0
            start = end
            at += 1
        assert start == length
    assert at == len(used)
    assert split_size is None or split_size % STEP == 0
    if split_size is not None and split_size > STEP:
        keys = [length - start for start, length in zip(starts, lengths, strict=True)]
        counts = [max(1, -(-size // (split_size - STEP))) for size in keys]
        assert sum(counts) > len(items) or max(counts) > FAN_IN**2


CASES = {
    "one": ([1], 4, None),
    "one-long": ([100_000], 67, None),
    "no-spare-items": ([300, 1, 0, 65], 4, None),
    "alike": ([1024] * 16, 66, None),
    "ragged": ([0, 1, 63, 64, 65, 128, 1000, 5000], 40, None),
    "one-giant": ([10] * 30 + [100_000] + [10] * 30, 127, None),
    "most-splits": ([STEP * FAN_IN**2 + 1], 2000, None),
    "window": ([0, 1, 99, 100, 101, 5000], 30, 100),
    "window-of-1": ([0, 1, 700], 30, 1),
    "many": ([i * 37 % 1500 for i in range(300)], 366, None),
    "padding": ([0] * 8, 20, None),
    "none": ([], 5, None),
}


@pytest.mark.parametrize("case", CASES)
def test_plan(case: str) -> None:
    lengths, num_items, window = CASES[case]
    plan = plan_splits(lens(*lengths), num_items, 3, sliding_window=window)
    expected = reference(lens(*lengths), num_items, 3, sliding_window=window)
    check(plan, lengths, window)
    assert torch.equal(plan.work_items, expected.work_items)
    assert torch.equal(plan.arrivals, expected.arrivals)
    assert plan[2:] == expected[2:] == (len(lengths), window)


def test_splits_of_a_known_step() -> None:
    """16 sequences of 1024 keys in 66 items: 5 splits each exceed it, 4 of 256 keys fit."""
    plan = plan_splits(lens(*[1024] * 16), 66, 8)
    assert plan.work_items[:5].tolist() == [
        [0, 0, 256, 0, 4],
        [0, 256, 512, 0, 4],
        [0, 512, 768, 0, 4],
        [0, 768, 1024, 0, 4],
        [1, 0, 256, 4, 4],
    ]


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "expected"),
    [(1, 8, 66), (16, 8, 66), (16, 3, 176), (100, 8, 133), (0, 1, 528), (0, 1000, 1)],
)
def test_work_items_fill_the_multiprocessors(sequences: int, kv_heads: int, expected: int) -> None:
    with patch.object(device, "limits", return_value=device.HOPPER):
        assert num_work_items(sequences, kv_heads, DEVICE) == expected


def test_without_triton_the_plan_is_the_same() -> None:
    lengths = [0, 1, 500, 3000]
    expected = plan_splits(lens(*lengths), 30, 2, sliding_window=1000)
    with patch.object(device, "runs_triton", return_value=False):
        plan = plan_splits(lens(*lengths), 30, 2, sliding_window=1000)
    assert torch.equal(plan.work_items, expected.work_items)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"seq_lens: must be torch\.int32"):
        plan_splits(lens(1).long(), 4, 2)
    with pytest.raises(ValueError, match="seq_lens: must have shape"):
        plan_splits(lens(1)[None], 4, 2)
    with pytest.raises(ValueError, match="seq_lens: must be contiguous"):
        plan_splits(lens(1, 2, 3, 4)[::2], 4, 2)
    with pytest.raises(ValueError, match="num_work_items: must be at least"):
        plan_splits(lens(1, 2), 1, 2)
    with pytest.raises(ValueError, match="num_kv_heads: must be at least 1"):
        plan_splits(lens(1, 2), 2, 0)
    with pytest.raises(ValueError, match="sliding_window: must be at least 1"):
        plan_splits(lens(1, 2), 2, 2, sliding_window=0)
