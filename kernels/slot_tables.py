"""Device state of the running sequences: tables with one row, called a slot, per sequence.

The host runs one step ahead: it schedules a step before it has seen the tokens of the step before.
So sampled tokens stay on the device, which appends them to these tables and builds the inputs of
the next step from them. All tables are views of one buffer, so that the host's changes between two
steps take one upload and one launch, in which each program writes one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels import device
from kernels.upload import upload

# Values of `SlotTables.finish_reasons`.
RUNNING, STOP, LENGTH = 0, 1, 2

_ALIGNMENT = 32  # values: each table starts at a 128-byte cache line


@dataclass(frozen=True, slots=True)
class SlotTables:
    """State of the running sequences, one in each of S slots; int32. Made by `allocate`.

    Each value has one writer at a time. The host writes a whole slot when a sequence is admitted,
    and its block table as it grows (`SlotWrites`). After that only `prepare_inputs` advances
    `num_computed_tokens`, and only `scatter_tokens` changes `token_ids`, `num_tokens` and
    `finish_reasons`. All of them run in stream order.

    Attributes:
        buffer: [N], all tables, one after the other.
        token_ids: [S, max_model_len], prompt, then output.
        block_tables: [S, max_blocks], ids of the sequence's KV blocks.
        stop_token_ids: [S, E], tokens that end the sequence, padded with -1.
        num_tokens: [S], prompt and output tokens so far.
        num_computed_tokens: [S], tokens whose KV is cached or being computed.
        num_prompt_tokens: [S].
        min_tokens: [S], stop tokens among the first min_tokens output tokens are ignored.
        max_tokens: [S], maximum number of output tokens.
        finish_reasons: [S], RUNNING, STOP or LENGTH.
    """

    buffer: Tensor
    token_ids: Tensor
    block_tables: Tensor
    stop_token_ids: Tensor
    num_tokens: Tensor
    num_computed_tokens: Tensor
    num_prompt_tokens: Tensor
    min_tokens: Tensor
    max_tokens: Tensor
    finish_reasons: Tensor

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        *,
        max_model_len: int,
        max_blocks: int,
        max_stop_token_ids: int,
        device: torch.device,
    ) -> SlotTables:
        """Return zeroed tables for `num_slots` sequences.

        Raises:
            ValueError: a size is not positive.
        """
        sizes = {
            "num_slots": num_slots,
            "max_model_len": max_model_len,
            "max_blocks": max_blocks,
            "max_stop_token_ids": max_stop_token_ids,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: must be positive (got {size})")
        shapes: list[tuple[int, ...]] = [
            (num_slots, max_model_len),
            (num_slots, max_blocks),
            (num_slots, max_stop_token_ids),
            *[(num_slots,)] * 6,
        ]
        places = [0, *accumulate(_aligned(prod(shape)) for shape in shapes)]
        buffer = torch.zeros(places[-1], dtype=torch.int32, device=device)
        return cls(
            buffer,
            *(
                buffer[place : place + prod(shape)].view(shape)
                for place, shape in zip(places, shapes, strict=False)
            ),
        )

    @property
    def num_slots(self) -> int:
        """S."""
        return self.num_tokens.shape[0]

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens per sequence."""
        return self.token_ids.shape[1]

    def clone(self) -> SlotTables:
        """Return a copy that shares nothing with this one."""
        copy = SlotTables.allocate(
            self.num_slots,
            max_model_len=self.max_model_len,
            max_blocks=self.block_tables.shape[1],
            max_stop_token_ids=self.stop_token_ids.shape[1],
            device=self.buffer.device,
        )
        copy.buffer.copy_(self.buffer)
        return copy


class SlotWrites:
    """The host's changes to `tables` before a step: collected, then applied in one launch."""

    def __init__(self, tables: SlotTables) -> None:
        """Collect changes to `tables`."""
        self._tables = tables
        self._places: list[int] = []  # offsets in the buffer, one per run of values
        self._runs: list[NDArray[np.int32]] = []

    def admit(
        self,
        slot: int,
        *,
        token_ids: Sequence[int] | NDArray[np.int32],
        num_prompt_tokens: int,
        num_computed_tokens: int,
        min_tokens: int,
        max_tokens: int,
        stop_token_ids: Sequence[int] | NDArray[np.int32],
        block_ids: Sequence[int] | NDArray[np.int32],
    ) -> None:
        """Assign `slot` to a sequence, new or resumed after a preemption.

        Args:
            slot: 0 to S - 1; no step still to be run may use it for another sequence.
            token_ids: its prompt and the output so far.
            num_prompt_tokens: how many of them are the prompt.
            num_computed_tokens: how many of them have their KV cached already.
            min_tokens, max_tokens, stop_token_ids: stop conditions. The device ignores a stop token
                that is left out: the sequence then runs until the host has seen the token.
            block_ids: its blocks so far.

        Raises:
            ValueError: a number is out of range, or a list is too long for its table.
        """
        tables = self._tables
        _check_range("token_ids", len(token_ids), 1, tables.max_model_len)
        _check_range("num_prompt_tokens", num_prompt_tokens, 1, len(token_ids))
        _check_range("num_computed_tokens", num_computed_tokens, 0, len(token_ids) - 1)
        _check_range("min_tokens", min_tokens, 0, 2**31 - 1)
        _check_range("max_tokens", max_tokens, 1, 2**31 - 1)
        num_stop_token_ids = tables.stop_token_ids.shape[1]
        _check_range("stop_token_ids", len(stop_token_ids), 0, num_stop_token_ids)
        padding = [-1] * (num_stop_token_ids - len(stop_token_ids))
        self._put("token_ids", tables.token_ids, slot, 0, token_ids)
        self.set_blocks(slot, 0, block_ids)
        self._put("stop_token_ids", tables.stop_token_ids, slot, 0, [*stop_token_ids, *padding])
        for table, value in (
            (tables.num_tokens, len(token_ids)),
            (tables.num_computed_tokens, num_computed_tokens),
            (tables.num_prompt_tokens, num_prompt_tokens),
            (tables.min_tokens, min_tokens),
            (tables.max_tokens, max_tokens),
            (tables.finish_reasons, RUNNING),
        ):
            self._put("slot", table[:, None], slot, 0, [value])

    def set_blocks(
        self, slot: int, start: int, block_ids: Sequence[int] | NDArray[np.int32]
    ) -> None:
        """Set the block table of `slot` from entry `start` on: new blocks, or copy-on-write copies.

        Raises:
            ValueError: `slot`, `start` or the number of blocks exceeds the table.
        """
        self._put("block_ids", self._tables.block_tables, slot, start, block_ids)

    def apply(self) -> None:
        """Write the changes on the current stream, and clear them.

        Raises:
            ValueError: a value was set twice; nothing is written then.
        """
        places = np.array(self._places, dtype=np.int64)
        sizes = np.array([len(run) for run in self._runs], dtype=np.int64)
        runs, self._places, self._runs = self._runs, [], []
        order = np.argsort(places)
        if (places[order][1:] < (places + sizes)[order][:-1]).any():
            raise ValueError("writes: a value was set twice")
        if not runs:
            return
        buffer = self._tables.buffer
        if device.runs_triton(buffer):
            _launch(buffer, places, sizes, np.concatenate(runs))
            return
        for place, run in zip(places, runs, strict=True):
            buffer[place : place + len(run)] = torch.from_numpy(run)

    def _put(
        self,
        name: str,
        table: Tensor,
        slot: int,
        start: int,
        values: Sequence[int] | NDArray[np.int32],
    ) -> None:
        _check_range("slot", slot, 0, table.shape[0] - 1)
        if start < 0 or start + len(values) > table.shape[1]:
            raise ValueError(
                f"{name}: entries {start} to {start + len(values)} exceed the table's "
                f"{table.shape[1]}"
            )
        if len(values):
            self._places.append(int(table.storage_offset()) + slot * table.stride(0) + start)
            self._runs.append(np.array(values, dtype=np.int32))


@triton.jit
def _kernel(buffer_ptr, chunks_ptr, values_ptr, CHUNK: tl.constexpr):
    i_chunk = tl.program_id(0)
    i_place = tl.load(chunks_ptr + 4 * i_chunk)
    i_value = tl.load(chunks_ptr + 4 * i_chunk + 1)
    size = tl.load(chunks_ptr + 4 * i_chunk + 2)
    o = tl.arange(0, CHUNK)
    m = o < size
    b_values = tl.load(values_ptr + i_value + o, mask=m)  # [CHUNK]
    tl.store(buffer_ptr + i_place + o, b_values, mask=m)


def settings() -> dict[str, int]:
    """Return chunk size and warps: 8 values per thread; most runs of values are short."""
    return {"CHUNK": 1024, "num_warps": 4}


def _launch(
    buffer: Tensor,
    places: NDArray[np.int64],
    sizes: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    chunk = settings()["CHUNK"]
    counts = -(-sizes // chunk)
    run = np.repeat(np.arange(len(sizes)), counts)  # of each chunk
    offset = chunk * (np.arange(len(run)) - np.repeat(np.cumsum(counts) - counts, counts))
    start = np.repeat(np.cumsum(sizes) - sizes, counts)
    rest = np.minimum(sizes[run] - offset, chunk)
    # The fourth column keeps the values after it aligned, which avoids a second specialisation.
    chunks = np.stack([places[run] + offset, start + offset, rest, 0 * rest], axis=1)
    packed = upload(np.concatenate([chunks.ravel().view(np.int32), values]), buffer.device)
    _kernel[(len(run),)](
        buffer_ptr=buffer,
        chunks_ptr=packed[: 2 * chunks.size].view(torch.int64),
        values_ptr=packed[2 * chunks.size :],
        **settings(),
    )


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _check_range(name: str, value: int, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise ValueError(f"{name}: must be {lowest} to {highest} (got {value})")
