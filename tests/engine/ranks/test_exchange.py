"""Ranks that exchange by torch's collectives: without our CPU kernels, and on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
import torch

from engine import LLM, SamplingParams
from engine.errors import EngineDeadError
from engine.ranks import exchange
from engine.ranks.exchange import CollectiveGroup, allocate_store
from engine.ranks.leader import MODULE
from tests.engine.ranks.test_shared_memory import in_order

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

T = TypeVar("T")


@contextmanager
def at_all(size: int) -> Iterator[Callable[[Callable[[CollectiveGroup], T]], list[T]]]:
    """Yield what calls a function for each rank at once."""
    file = allocate_store()
    with ThreadPoolExecutor(size) as pool:

        def join(rank: int) -> CollectiveGroup:
            return CollectiveGroup(file, rank, size, device=CPU, patience_s=60.0)

        groups = list(pool.map(join, range(size)))
        os.close(file)
        yield lambda call: list(pool.map(call, groups))


@pytest.mark.parametrize("size", [2, 3])
def test_sum_of_any_dtype_has_the_bits_of_the_order_of_ranks(size: int) -> None:
    shapes = [(1, 1), (3, 70), (64, 1030)]
    cases = [
        [torch.randn(*shape).to(dtype) for _ in range(size)] for shape in shapes for dtype in DTYPES
    ]
    with at_all(size) as run:
        found = run(lambda group: [group.sum(case[group.rank]) for case in cases])
    for sums in found:
        for total, case in zip(sums, cases, strict=True):
            assert torch.equal(total, in_order(case))


def test_gather_uneven_widths_are_beside_each_other_at_rank_0() -> None:
    widths = [3, 1, 2]
    parts = [torch.randn(5, width) for width in widths]
    with at_all(3) as run:
        found = run(lambda group: group.gather(parts[group.rank], widths))
    assert torch.equal(found[0], torch.cat(parts, 1))
    assert all(torch.equal(*pair) for pair in zip(found[1:], parts[1:], strict=True))


def test_agreements_and_tokens_are_those_of_the_least_and_the_first() -> None:
    with at_all(3) as run:
        assert run(lambda group: group.least(10 - group.rank)) == [8, 8, 8]
        assert run(lambda group: group.first(10 - group.rank)) == [10, 10, 10]
        tokens = run(lambda group: group.share(torch.tensor([group.rank, 7])).tolist())
        assert tokens == [[0, 7]] * 3
        assert all(run(lambda group: group.wait_seconds() > 0))


@pytest.fixture
def without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "shares_memory", lambda: False)


@pytest.mark.usefixtures("without_shared_memory")
def test_ranks_without_shared_memory_give_the_same_tokens(checkpoint: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7], list(range(20, 50))]

    def tokens(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 64}
    expected = tokens(LLM(str(checkpoint), **settings))
    llm = LLM(str(checkpoint), tensor_parallel_size=2, **settings)
    assert tokens(llm) == expected
    (rank,) = [each for each in psutil.Process().children() if MODULE in each.cmdline()]
    rank.kill()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* was killed by SIGKILL"):
        llm.generate(prompts, params, use_tqdm=False)


def test_rank_without_memory_for_a_step_ends_the_engine_with_its_error(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), tensor_parallel_size=2, device="cpu", dtype="float32")
    (rank,) = [each for each in psutil.Process().children() if MODULE in each.cmdline()]
    rank.rlimit(psutil.RLIMIT_AS, (rank.memory_info().vms,) * 2)
    prompts = [[5 + i, *range(5, 125)] for i in range(30)]
    # What it is depends on which library has no memory.
    with pytest.raises(EngineDeadError, match=r"^rank 1 \(process \d+\) failed: .+"):
        llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
