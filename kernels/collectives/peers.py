"""Peers: memory in which the kernels of ranks, each on a GPU of its own, exchange and meet.

The programs of one number of all ranks exchange among themselves. Each has two halves in its rank's
buffer, and writes to them in turn: what it writes before its meeting of number `count` lies in half
`count % 2`. It comes to meeting `count + 1` only when it has read what the others wrote for meeting
`count`, so that whoever has left meeting `count + 1` may write to the half of `count` again, and an
exchange takes one meeting. All that changes is in device memory: a launch can be captured in a CUDA
graph, and grids may differ from launch to launch, as long as they are the same at all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 32  # of a launch at most: all run at once on any GPU, as programs that wait must
HALF_BYTES = 65536
BUFFER_BYTES = PROGRAMS * 2 * HALF_BYTES
MOST_RANKS = 8  # of a machine with NVLink between all pairs
SIGNAL_BYTES = PROGRAMS * 2 * MOST_RANKS * 4

_HALF = tl.constexpr(HALF_BYTES)


@dataclass(frozen=True, slots=True)
class Peers:
    """The memory of all ranks, as one of them sees it.

    Attributes:
        rank: of this one.
        size: how many there are.
        buffers: int64 [size], where each rank's buffer of BUFFER_BYTES is, aligned to 16 bytes.
        signals: int64 [size], where each rank's SIGNAL_BYTES are, which are 0 at first.
        counts: int32 [PROGRAMS], in how many meetings each program was; 0 at first.
        aborted: int32 [1]; unless it is 0, no program waits any more, and results are undefined.
        owner: of the memory at these addresses.
    """

    rank: int
    size: int
    buffers: Tensor
    signals: Tensor
    counts: Tensor
    aborted: Tensor
    owner: object = None


@triton.jit
def half(buffers_ptr, i_rank, count, dtype: tl.constexpr):
    """Return where this program's half for meeting `count` is in a rank's buffer."""
    p_buffer = tl.load(buffers_ptr + i_rank).to(tl.pointer_type(tl.int8))
    p_half = p_buffer + (2 * tl.program_id(0) + (count & 1)) * _HALF
    return tl.multiple_of(p_half.to(tl.pointer_type(dtype)), 16)


@triton.jit
def meet(signals_ptr, aborted_ptr, rank, count, RANKS: tl.constexpr, LANES: tl.constexpr):
    """Wait for this program's meeting `count` with those of all ranks; see what they have written.

    The barriers order the writes of all threads before the release, and their reads behind the
    acquire, by the threads that signal. A rank that has left may signal the next meeting already,
    for which it has another word, but not the one after that.

    Args:
        LANES: a power of two above RANKS.
    """
    o_rank = tl.arange(0, LANES)
    m_rank = o_rank < RANKS
    i_slot = (2 * tl.program_id(0) + (count & 1)) * RANKS
    p_theirs = tl.load(signals_ptr + o_rank, mask=m_rank, other=0).to(tl.pointer_type(tl.int32))
    p_mine = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32)) + i_slot
    # One lane more sees whether to wait: all threads must agree on that.
    p_seen = tl.where(m_rank, p_mine + o_rank, aborted_ptr)
    b_signal = tl.full([LANES], 0, tl.int32) + (count + 1)
    tl.debug_barrier()
    tl.atomic_xchg(p_theirs + i_slot + rank, b_signal, mask=m_rank, sem="release", scope="sys")
    arrived = 0
    while arrived < RANKS:
        b_seen = tl.atomic_add(p_seen, 0, mask=o_rank <= RANKS, sem="acquire", scope="sys")
        b_arrived = tl.where(m_rank, b_seen == b_signal, (o_rank == RANKS) & (b_seen != 0))
        arrived = tl.sum(tl.where(m_rank, 1, RANKS) * b_arrived.to(tl.int32), 0)
    tl.debug_barrier()
