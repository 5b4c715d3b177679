"""All ranks have peers, or none: one that has them would wait for one that has not."""

from __future__ import annotations

from itertools import count, repeat
from typing import Any

import pytest
import torch

from engine.ranks import symmetric_memory
from kernels.collectives.peers import Peers
from tests.factories.thread_ranks import ThreadGroup, ThreadGroups

SIZE = 3


def peers_of(rank: int) -> Peers:
    return Peers(rank, SIZE, *(torch.empty(0) for _ in range(4)))


def found(size: int = SIZE) -> list[Peers | None]:
    """Return what each rank has joined."""

    def join(group: ThreadGroup) -> Peers | None:
        device = torch.device("cuda", group.rank)
        return symmetric_memory.join_if_all_can(None, group.rank, size, device, group.least)

    return ThreadGroups(size).run(join)


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks have peers, of processes that have joined nothing before."""
    monkeypatch.setattr(symmetric_memory, "_joins", repeat(0))
    monkeypatch.setattr(symmetric_memory, "reaches", lambda device, other: True)
    monkeypatch.setattr(symmetric_memory, "join", lambda store, rank, size, device: peers_of(rank))
    monkeypatch.setattr(symmetric_memory, "_adds", lambda peers: True)


def test_ranks_that_all_can_have_peers() -> None:
    assert [peers and peers.rank for peers in found()] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 9])
def test_one_rank_and_more_than_there_are_signals_for_have_none(size: int) -> None:
    assert found(size) == [None] * size


@pytest.mark.parametrize("what", ["reaches", "join", "_adds"])
def test_none_has_peers_if_one_cannot(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(symmetric_memory, what)

    def fails_at_rank_1(*arguments: Any) -> Any:
        match arguments:
            case (torch.device(index=1), _) | (Peers(rank=1),):
                return False
            case (_, 1, _, _):
                raise RuntimeError("the memory of rank 2 cannot be mapped")
        return whole(*arguments)

    monkeypatch.setattr(symmetric_memory, what, fails_at_rank_1)
    assert found() == [None] * SIZE


def test_none_has_peers_if_one_process_has_joined_another_group_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(symmetric_memory, "_joins", count())  # the ranks are threads of one
    assert found() == [None] * SIZE


def test_torch_without_symmetric_memory_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if torch.cuda.is_available():
        pytest.skip("it has it")
    with pytest.raises(RuntimeError):
        symmetric_memory.join(None, 0, 2, torch.device("cuda", 0))
