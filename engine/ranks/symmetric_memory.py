"""Peers of the GPUs of one machine, from torch's symmetric memory: an alpha API, only used here."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed

from kernels.collectives.peers import BUFFER_BYTES, MOST_RANKS, PROGRAMS, SIGNAL_BYTES, Peers
from kernels.collectives.rank_sum import rank_sum

cuda: Any = torch.cuda  # some of which has no types
log = logging.getLogger("trident.engine")

_NAME = "trident-ranks"
_CHECK_S = 60.0  # for a first sum: the kernels are compiled meanwhile
_joins = count()  # torch numbers the messages of a rendezvous by process, not by group


def join_if_all_can(
    store: Any, rank: int, size: int, device: torch.device, least: Callable[[int], int]
) -> Peers | None:
    """Return the peers of `rank`, and None at all ranks if those of one cannot be had.

    Args:
        store: for this alone, of torch, which all ranks have.
        device: of this rank; of the others it is the one of their number.
        least: returns the least value of all ranks.
    """
    number = next(_joins)
    can = 2 <= size <= MOST_RANKS and all(reaches(device, other) for other in range(size))
    # Ranks whose processes have joined different numbers of groups would wait for each other.
    if not least(can) or least(number) != -least(-number):
        return None
    peers = None
    try:
        peers = join(store, rank, size, device)
    except Exception as error:
        log.warning("rank %d has no symmetric memory: %s", rank, str(error).partition("\n")[0])
    if not least(peers is not None):
        return None
    assert peers is not None
    if not least(_adds(peers)):
        log.warning("rank %d: GPUs that read each other's memory read it wrongly", rank)
        return None
    return peers


def join(store: Any, rank: int, size: int, device: torch.device) -> Peers:
    """Return the peers of `rank`; waits for the others.

    Raises:
        RuntimeError: another rank does not come, or its memory cannot be mapped.
    """
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    memory = c10d._SymmetricMemory
    if memory.get_backend(device) != "CUDA" or memory.signal_pad_size < SIGNAL_BYTES:
        raise RuntimeError("torch has another kind of symmetric memory")
    # It finds the group, whose store it uses, by name; the name does not keep it alive.
    group: Any = torch.distributed.ProcessGroup(store, rank, size)
    c10d._register_process_group(_NAME, group)
    try:
        buffer = memory.empty_strided_p2p((BUFFER_BYTES,), (1,), torch.uint8, device)
        handle = memory.rendezvous(buffer, _NAME)
    finally:
        c10d._unregister_process_group(_NAME)
    buffers, signals = (
        torch.tensor(addresses, dtype=torch.int64, device=device)
        for addresses in (handle.buffer_ptrs, handle.signal_pad_ptrs)
    )
    counts, aborted = (
        torch.zeros(length, dtype=torch.int32, device=device) for length in (PROGRAMS, 1)
    )
    return Peers(rank, size, buffers, signals, counts, aborted, owner=(buffer, handle))


def reaches(device: torch.device, other: int) -> bool:
    """Return whether a GPU can read the memory of the one of number `other`."""
    return device.index == other or bool(cuda.can_device_access_peer(device, other))


def _adds(peers: Peers) -> bool:
    """Return whether sums are right: some machines report access between GPUs, and lose writes."""
    device = peers.counts.device
    with cuda.device(device):
        x = torch.arange(4096.0, device=device).view(4, -1)
        sums = [
            rank_sum(x * (peers.rank + 1), peers, is_two_shot=is_two_shot)
            for is_two_shot in (False, True)
        ]
        done: Any = cuda.Event()
        done.record()
        end = time.monotonic() + _CHECK_S
        while not done.query():
            if time.monotonic() > end:
                abort(peers)
                return False
            time.sleep(1e-3)
        expected = x * (peers.size * (peers.size + 1) // 2)
        return all(torch.equal(each, expected) for each in sums)


def abort(peers: Peers) -> None:
    """Have kernels of this rank that wait for another one end, now or later."""
    with cuda.device(peers.aborted.device), cuda.stream(cuda.Stream()):
        peers.aborted.fill_(1)  # beside the stream that waits
