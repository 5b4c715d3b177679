"""States of a state layer: where a step reads and writes them.

A state is a block of a pool, read and written by id. It has two parts: the ring, the convolution's
inputs of the last tokens, each in the ring row of its position; and what the rule has accumulated.
A row of a step may read one block and write another, so sequences with a common prefix read the
same block without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import device
from kernels.checks import check_contiguous, check_device, check_dtype, check_like, check_shape
from kernels.state.sub_chunks import SubChunks, index_sub_chunks


class StateCache(NamedTuple):
    """States of one layer, of N blocks. Block 0 is all zeros and never written: a new sequence's.

    Blocks may lie apart; each is contiguous in itself.

    Attributes:
        ring: [N, R, C] in the model's dtype, inputs of the convolution of the last R tokens: of the
            token at position p in row p % R. R is at least the convolution's kernel size.
        state: float32 [N, H, K, V]; None for a short convolution, which has none.
    """

    ring: Tensor
    state: Tensor | None


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states that the B rows of a step read and write; all int32, on the model's device.

    A block that a row writes is neither read nor written by another row. A row's saves go to
    different blocks, none of which is its `reads` or its `writes`. Values are not checked.

    Attributes:
        query_start_loc: [B + 1], ascending from 0: the range of each row's tokens. More tokens may
            follow the last row's: padding.
        seq_lens: [B], tokens of the sequence including those of this step; 0 for an idle row, for
            which nothing is read or written.
        reads: [B], block with the state after the tokens before the row's first.
        writes: [B], block that gets the state after the row's last token, which may be the one in
            `reads`; -1 for an idle row.
        saves: [B, M, 2], pairs of a position and a block, in any order: the state after the first
            `position` tokens of the sequence also goes to `block`. Ignored if the block is -1, if
            the position is not behind the row's start, or if it is behind the row's end.
        sub_chunks: on a GPU, of the rows of several tokens; None: each layer finds them anew.

    Raises:
        ValueError: an array has a wrong shape, dtype, stride or device.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    reads: Tensor
    writes: Tensor
    saves: Tensor
    sub_chunks: SubChunks | None = None

    def __post_init__(self) -> None:
        """Check the arrays here, once for all layers."""
        check_shape("seq_lens", self.seq_lens, (None,))
        rows = len(self.seq_lens)
        for name, shape in (
            ("query_start_loc", (rows + 1,)),
            ("seq_lens", (rows,)),
            ("reads", (rows,)),
            ("writes", (rows,)),
            ("saves", (rows, None, 2)),
        ):
            tensor: Tensor = getattr(self, name)
            check_shape(name, tensor, shape)
            check_dtype(name, tensor, torch.int32)
            check_device(name, tensor, self.seq_lens.device)
            check_contiguous(name, tensor)

    def indexed(self, num_tokens: int, num_decodes: int) -> StepStates:
        """Return these with the sub-chunks of a step if kernels on their device use them.

        Args:
            num_tokens: of the step, padding included.
            num_decodes: so many rows, at least, have one token.
        """
        if not device.runs_triton(self.seq_lens):
            return self
        found = index_sub_chunks(
            self.query_start_loc, self.seq_lens, self.writes, num_tokens, num_decodes=num_decodes
        )
        return replace(self, sub_chunks=found)

    def sub_chunks_of(self, num_tokens: int) -> SubChunks:
        """Return the sub-chunks of a step of so many tokens, padding included."""
        if self.sub_chunks is not None:
            return self.sub_chunks
        return index_sub_chunks(self.query_start_loc, self.seq_lens, self.writes, num_tokens)


def check_states(
    cache: StateCache, step: StepStates, x: Tensor, channels: int, kernel_size: int
) -> None:
    """Raise unless the cache has rings of these channels, and both are where the tokens `x` are.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_shape("cache.ring", cache.ring, (None, None, channels))
    check_like("cache.ring", cache.ring, x)
    check_blocks("cache.ring", cache.ring)
    if cache.ring.shape[1] < kernel_size:
        raise ValueError(
            f"cache.ring: must have a row for each of the kernel's {kernel_size} taps "
            f"(got {cache.ring.shape[1]})"
        )
    check_device("step", step.seq_lens, x.device)


def check_head_states(
    cache: StateCache, shape: tuple[int | None, int | None, int | None], x: Tensor
) -> Tensor:
    """Return the states of heads, float32 of that shape in each block, where the tokens `x` are.

    Raises:
        ValueError: they are missing, or have a wrong shape, dtype, stride or device.
    """
    if cache.state is None:
        raise ValueError("cache.state: must be given")
    check_shape("cache.state", cache.state, (len(cache.ring), *shape))
    check_dtype("cache.state", cache.state, torch.float32)
    check_device("cache.state", cache.state, x.device)
    check_blocks("cache.state", cache.state)
    return cache.state


def check_blocks(name: str, blocks: Tensor) -> None:
    """Raise unless there is a block 0 and each block is contiguous."""
    if not len(blocks):
        raise ValueError(f"{name}: must have a block 0, of zeros (got shape {list(blocks.shape)})")
    if not blocks[0].is_contiguous():
        raise ValueError(
            f"{name}: each block must be contiguous (got strides {list(blocks.stride())})"
        )


@dataclass(frozen=True, slots=True)
class StepRow:
    """A row of a step that is not idle, on the host: `StepStates` describes its fields.

    Attributes:
        begin, end: range of its tokens among those of the step.
        start: position of the first.
    """

    begin: int
    end: int
    start: int
    reads: int
    writes: int
    saves: tuple[tuple[int, int], ...]


def step_rows(step: StepStates) -> Iterator[StepRow]:
    """Yield the rows of a step that are not idle, in order. Waits for the device."""
    starts = step.query_start_loc.tolist()
    lengths, reads, writes = step.seq_lens.tolist(), step.reads.tolist(), step.writes.tolist()
    for i, saves in enumerate(step.saves.tolist()):
        begin, end = starts[i], starts[i + 1]
        if lengths[i] == 0 or writes[i] < 0 or begin == end:
            continue
        start = lengths[i] - (end - begin)
        kept = tuple(
            (position, block)
            for position, block in saves
            if block >= 0 and start < position <= lengths[i]
        )
        yield StepRow(begin, end, start, reads[i], writes[i], kept)


def with_history(ring: Tensor, row: StepRow, inputs: Tensor) -> Tensor:
    """Return the row's convolution inputs [n, C] behind those of the R positions before it.

    Those of positions before the sequence are zeros.
    """
    size = ring.shape[1]
    positions = torch.arange(row.start - size, row.start, device=ring.device)
    before = ring[row.reads, positions % size]
    return torch.cat((before.masked_fill(positions[:, None] < 0, 0), inputs))


def store_row_rings(ring: Tensor, row: StepRow, inputs: Tensor) -> None:
    """Write the rings of a row's saves and of its end; `inputs` are those of `with_history`."""
    size = ring.shape[1]
    for position, block in (*row.saves, (row.start + row.end - row.begin, row.writes)):
        positions = torch.arange(position - size, position, device=ring.device)
        offset = position - row.start
        ring[block, positions % size] = inputs[offset : offset + size]


def convolve_tokens(inputs: Tensor, weight: Tensor, bias: Tensor | None, num_tokens: int) -> Tensor:
    """Return the causal convolution of each channel for the last tokens, float32 [num_tokens, C].

    The taps are added in their order, so that a token's result does not depend on the others'.

    Args:
        inputs: [R + num_tokens, C], of `with_history`.
        weight: [C, kernel size]; the last tap is the token's own.
        bias: [C] or None.
    """
    kernel_size = weight.shape[1]
    first = len(inputs) - num_tokens - kernel_size + 1
    wide, taps = inputs.float(), weight.float()
    total = wide[first : first + num_tokens] * taps[:, 0]
    for tap in range(1, kernel_size):
        total = total + wide[first + tap : first + tap + num_tokens] * taps[:, tap]
    return total if bias is None else total + bias.float()
