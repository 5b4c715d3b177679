"""Ranks that exchange by torch's collectives: without our CPU kernels, and on GPUs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import torch
from torch import Tensor

from engine import LLM, SamplingParams
from engine.errors import EngineDeadError
from engine.ranks import exchange
from engine.ranks.exchange import CollectiveGroup, allocate_store
from engine.ranks.leader import MODULE
from tests.engine.ranks.test_shared_memory import in_order
from tests.factories.checkpoints import write_checkpoint
from tests.factories.paged_model import PagedModel
from tests.factories.thread_ranks import ThreadGroups

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

T = TypeVar("T")


Call = tuple[str, tuple[int, ...], torch.dtype]  # kind, shape and dtype


class Collectives:
    """NCCL of ranks that are threads: each call must be the same one at all of them.

    Attributes:
        traces: by rank, the calls.
    """

    def __init__(self, size: int) -> None:
        self.traces: list[list[Call]] = [[] for _ in range(size)]
        self._given = [torch.empty(0)] * size
        self._barrier = threading.Barrier(size, timeout=60)

    def exchange(self, rank: int, kind: str, x: Tensor) -> list[Tensor]:
        """Return what all ranks have given; raises if one has made another call."""
        trace = self.traces[rank]
        trace.append((kind, tuple(x.shape), x.dtype))
        self._given[rank] = x.clone()
        self._barrier.wait()
        given, calls = list(self._given), {each[-1] for each in self.traces}
        self._barrier.wait()  # before one of them calls again
        assert len(calls) == 1, f"different calls: {calls}"
        return given


class FakeNCCL:
    """One rank's process group, with what `CollectiveGroup` calls of NCCL's."""

    def __init__(self, collectives: Collectives, rank: int) -> None:
        self._exchange = lambda kind, x: collectives.exchange(rank, kind, x)
        self._rank = rank

    def wait(self) -> None:
        """Be the work that each call returns, and done."""

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> FakeNCCL:
        (x,) = tensors
        parts = torch.stack(self._exchange("allreduce", x))
        is_least = options is not None and options.reduceOp == exchange.dist.ReduceOp.MIN
        x.copy_(parts.amin(0) if is_least else parts.sum(0))
        return self

    def allgather(self, outputs: list[list[Tensor]], tensors: list[Tensor]) -> FakeNCCL:
        for out, part in zip(outputs[0], self._exchange("allgather", tensors[0]), strict=True):
            out.copy_(part)
        return self

    def gather(self, outputs: list[list[Tensor]], tensors: list[Tensor], options: Any) -> FakeNCCL:
        assert options.rootRank == 0
        assert bool(outputs) == (self._rank == 0)
        parts = self._exchange("gather", tensors[0])
        for out, part in zip(outputs[0] if outputs else parts, parts, strict=True):
            out.copy_(part)
        return self

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeNCCL:
        assert options.rootRank == 0
        tensors[0].copy_(self._exchange("broadcast", tensors[0])[0])
        return self


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


@pytest.mark.parametrize("deterministic", [False, True])
def test_nccl_gets_the_calls_of_a_step_in_their_order_and_of_one_shape(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path)
    token_ids, chunks, size = list(range(20, 50)), [17, 1, 12], 3
    collectives, store = Collectives(size), allocate_store()
    monkeypatch.setattr(exchange, "_backend", lambda store, rank, *_: FakeNCCL(collectives, rank))

    def run(rank: int) -> Tensor:
        group = CollectiveGroup(
            store, rank, size, device=CPU, patience_s=60.0, deterministic=deterministic
        )
        assert group.least(5 + rank) == 5
        assert group.first(7 + rank) == 7
        logits = PagedModel(tmp_path, group=group).logits(token_ids, chunks)
        assert group.share(torch.tensor([rank, 3])).tolist() == [0, 3]
        return logits

    with ThreadPoolExecutor(size) as pool:
        logits, *_ = pool.map(run, range(size))
    os.close(store)
    agreements: list[Call] = [(kind, (1,), torch.int64) for kind in ("allreduce", "broadcast")]
    kind = "allgather" if deterministic else "allreduce"
    steps: list[Call] = []
    for length in chunks:  # the embedding and two sums of each of three layers, then the logits
        steps += [(kind, (length, 64), torch.float32)] * 7
        steps += [("gather", (length, 64), torch.float32)]
    shared: Call = ("broadcast", (2,), torch.int64)
    for trace in collectives.traces:
        assert trace == [*agreements, *steps, shared]
    expected, *_ = ThreadGroups(size).run(
        lambda group: PagedModel(tmp_path, group=group).logits(token_ids, chunks)
    )
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_nccl_with_a_call_of_another_shape_at_one_rank_is_noticed() -> None:
    collectives = Collectives(2)

    def call(rank: int) -> None:
        with pytest.raises(AssertionError, match="different calls"):
            FakeNCCL(collectives, rank).allreduce([torch.zeros(1 + rank)])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))


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
