"""Sums over ranks have the same bits at every rank, however large they are."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ranks.shared_memory import SharedMemoryGroup, allocate_shared_memory
from kernels.cpu.library import operations
from tests.factories.checkpoints import write_checkpoint
from tests.factories.paged_model import PagedModel

pytestmark = pytest.mark.skipif(
    operations(torch.empty(0)) is None, reason="the CPU kernels are not built"
)

T = TypeVar("T")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def groups(size: int, patience_s: float = 60.0) -> Iterator[list[SharedMemoryGroup]]:
    file = allocate_shared_memory(size)
    try:
        yield [SharedMemoryGroup(file, i, size, patience_s=patience_s) for i in range(size)]
    finally:
        os.close(file)


def at_all(ranks: list[SharedMemoryGroup], call: Callable[[SharedMemoryGroup], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(call, ranks))


def in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@settings(max_examples=50, deadline=None)
@given(
    size=st.integers(2, 5),
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5000)), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_sum_any_shapes_has_the_bits_of_the_order_of_ranks(
    size: int, shapes: list[tuple[int, int]], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [
        [torch.randn(shape, generator=generator).to(dtype) for _ in range(size)] for shape in shapes
    ]
    with groups(size) as ranks:
        found = at_all(ranks, lambda rank: [rank.sum(each[rank.rank]) for each in parts])
    for sums in found:
        for total, each in zip(sums, parts, strict=True):
            assert torch.equal(total, in_order(each))


@pytest.mark.parametrize("rows", [1, 3, 700])
def test_sum_larger_than_the_memory_goes_in_chunks(rows: int) -> None:
    parts = [torch.randn(rows, 4100, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    with groups(2) as ranks:
        for total in at_all(ranks, lambda rank: rank.sum(parts[rank.rank])):
            assert torch.equal(total, in_order(parts))


@given(widths=st.lists(st.integers(1, 400), min_size=2, max_size=4), rows=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_gather_uneven_widths_are_beside_each_other_at_rank_0(widths: list[int], rows: int) -> None:
    parts = [torch.randn(rows, width) for width in widths]
    with groups(len(widths)) as ranks:
        found = at_all(ranks, lambda rank: rank.gather(parts[rank.rank], widths))
    assert torch.equal(found[0], torch.cat(parts, 1))
    assert all(torch.equal(*pair) for pair in zip(found[1:], parts[1:], strict=True))


def test_gather_more_rows_than_the_memory_holds_goes_in_chunks() -> None:
    widths = [300_000, 200_000]
    parts = [torch.randn(9, width) for width in widths]
    with groups(2) as ranks:
        found = at_all(ranks, lambda rank: rank.gather(parts[rank.rank], widths))
    assert torch.equal(found[0], torch.cat(parts, 1))


def test_share_many_steps_in_turn_with_sums_gives_the_values_of_rank_0() -> None:
    def run(rank: SharedMemoryGroup) -> list[Tensor]:
        found = []
        for step in range(200):
            rank.sum(torch.ones(1, 64))
            found.append(
                rank.share(torch.tensor([step, 7]) if rank.rank == 0 else torch.empty(2).long())
            )
        return found

    with groups(3) as ranks:
        for found in at_all(ranks, run):
            assert [each.tolist() for each in found] == [[step, 7] for step in range(200)]


def test_agreements_are_the_least_and_the_first_value() -> None:
    with groups(3) as ranks:
        assert at_all(ranks, lambda rank: rank.least(10 - rank.rank)) == [8, 8, 8]
        assert at_all(ranks, lambda rank: rank.first(10 - rank.rank)) == [10, 10, 10]


def test_sum_without_the_other_rank_ends_with_its_number() -> None:
    with groups(2, patience_s=0.3) as ranks, pytest.raises(RuntimeError, match=r"^rank 1 did not"):
        ranks[0].sum(torch.ones(1, 8))


def test_abort_ends_a_wait_that_has_no_limit() -> None:
    with groups(2) as ranks:
        waiting = threading.Event()

        def wait() -> None:
            waiting.set()
            with pytest.raises(RuntimeError, match="another rank of the model has ended"):
                ranks[0].least(1)

        with ThreadPoolExecutor(1) as pool:
            done = pool.submit(wait)
            assert waiting.wait(10)
            ranks[1].abort()
            done.result(30)
        with pytest.raises(RuntimeError, match="another rank"):
            ranks[0].sum(torch.ones(1))


def test_wait_for_a_late_rank_is_counted() -> None:
    with groups(2) as ranks:

        def run(rank: SharedMemoryGroup) -> float:
            if rank.rank:
                time.sleep(0.2)
            rank.sum(torch.ones(1, 8))
            return rank.wait_seconds()

        assert at_all(ranks, run)[0] >= 0.1


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"]
)
def test_deterministic_ranks_give_a_token_the_same_bits_in_any_chunks(
    architecture: str, tmp_path: Path
) -> None:
    """Of Llama and Qwen3 all layers are one operation; Mixtral's experts are not in one."""
    write_checkpoint(tmp_path, architecture, intermediate_size=96)
    draw = random.Random(0)
    token_ids = [draw.randrange(160) for _ in range(40)]

    def load(group: SharedMemoryGroup | None = None) -> PagedModel:
        return PagedModel(tmp_path, deterministic=True, group=group)

    def run(group: SharedMemoryGroup) -> tuple[Tensor, Tensor, bool]:
        model = load(group)
        whole = model.logits(token_ids)
        return whole, model.logits(token_ids, [19, 1, 1, 19]), model.model.model.fused is not None

    expected = load().logits(token_ids)
    with groups(2) as ranks:
        (whole, chunked, is_fused), _ = at_all(ranks, run)
    assert is_fused == (architecture != "MixtralForCausalLM")
    assert torch.equal(whole, chunked)
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-4)
