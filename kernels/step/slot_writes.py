"""The host's changes to the slot tables between two steps: one upload and one launch.

The changes are runs of values for consecutive entries of the tables' buffer; each program writes
one chunk of a run.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from kernels import device
from kernels.step.sampling_columns import RUNNING
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.upload import upload


class SlotWrites:
    """The host's changes to `tables` before a step: collected, then applied in one launch."""

    def __init__(self, tables: SeqSlotTables) -> None:
        """Collect changes to `tables`."""
        self._tables = tables
        # Runs of values: their offsets in the buffer, their lengths, and all values in turn.
        self._offsets: list[NDArray[np.int64]] = []
        self._sizes: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.int32]] = []

    def admit(
        self,
        slots: NDArray[np.int32],
        *,
        start_loc: NDArray[np.int32],
        token_ids: NDArray[np.int32],
        num_prompt_tokens: NDArray[np.int32],
        num_computed_tokens: NDArray[np.int32],
        min_tokens: NDArray[np.int32],
        max_tokens: NDArray[np.int32],
        stop_token_ids: NDArray[np.int32],
        **columns: NDArray[Any],
    ) -> None:
        """Assign `slots` [A] to sequences, new or resumed after a preemption.

        Args:
            slots: no step still to be run may use them for other sequences.
            start_loc: [A + 1], where the tokens of each begin in `token_ids`.
            token_ids: their prompts, each with the output so far.
            num_prompt_tokens: [A], how many of them are the prompt.
            num_computed_tokens: [A], how many of them have their KV cached already.
            min_tokens, max_tokens, stop_token_ids: [A] and [A, E], stop conditions. The device
                ignores a stop token that is left out: the sequence then runs until the host has
                seen the token.
            columns: of further tables, by name.

        Raises:
            ValueError: a number is out of range, or a list is too long for its table.
        """
        tables = self._tables
        num_tokens = np.diff(start_loc)
        for name, values, lowest, highest in (
            ("slots", slots, 0, tables.num_slots - 1),
            ("token_ids", num_tokens, 1, tables.max_model_len),
            ("num_prompt_tokens", num_prompt_tokens, 1, num_tokens),
            ("num_computed_tokens", num_computed_tokens, 0, num_tokens - 1),
            ("min_tokens", min_tokens, 0, 2**31 - 1),
            ("max_tokens", max_tokens, 1, 2**31 - 1),
        ):
            _check_range(name, values, lowest, highest)
        self.set_lists("token_ids", slots, 0 * slots, start_loc, token_ids)
        columns |= {
            "stop_token_ids": stop_token_ids,
            "num_tokens": num_tokens,
            "num_computed_tokens": num_computed_tokens,
            "num_prompt_tokens": num_prompt_tokens,
            "min_tokens": min_tokens,
            "max_tokens": max_tokens,
            "finish_reasons": np.full_like(slots, RUNNING),
            "num_counted_tokens": np.zeros_like(slots),
        }
        numbers = []  # of tables with one for each slot, which are set together
        for name, values in columns.items():
            if values.shape == slots.shape and values.itemsize == slots.itemsize:
                numbers.append((getattr(tables, name).storage_offset(), values.view(np.int32)))
            else:
                self.set_column(name, slots, values)
        offsets, rows = zip(*numbers, strict=True)
        self._offsets.append(np.add.outer(np.array(offsets), slots).ravel())
        self._sizes.append(np.ones(len(offsets) * len(slots), dtype=np.int64))
        self._values.append(np.concatenate(rows))

    def set_column(self, name: str, slots: NDArray[np.int32], values: NDArray[Any]) -> None:
        """Set the rows `slots` [A] of the table `name` to `values` [A, ...], of its dtype.

        Raises:
            ValueError: a slot is out of range, or `values` do not suit the table.
        """
        table: Tensor = getattr(self._tables, name)
        wanted = (len(slots), *table.shape[1:])
        if values.shape != wanted or values.itemsize != table.itemsize:
            raise ValueError(f"{name}: must have shape {list(wanted)} (got {list(values.shape)})")
        starts = np.zeros(len(slots), dtype=np.int32)
        words = prod(table.shape[1:]) * table.itemsize // 4
        start_loc = words * np.arange(len(slots) + 1)
        flat = np.ascontiguousarray(values).view(np.int32).ravel()
        self._put(name, slots, starts, start_loc, flat, words)

    def set_lists(
        self,
        name: str,
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        start_loc: NDArray[np.int32],
        values: NDArray[np.int32],
    ) -> None:
        """Set entries of the rows `slots` [A] of an int32 table, from `starts` [A] on.

        Args:
            name: of a table with two dimensions.
            start_loc: [A + 1]; values[start_loc[i] : start_loc[i + 1]] are for slots[i].

        Raises:
            ValueError: a slot or an entry is out of range.
        """
        self._put(name, slots, starts, start_loc, values, getattr(self._tables, name).shape[1])

    def set_step(self, slots: NDArray[np.int32], query_start_loc: NDArray[np.int32]) -> None:
        """Set the first B rows of the next step, and where their tokens begin, [B + 1]."""
        self._set_rows("step_slots", slots)
        self._set_rows("query_start_loc", query_start_loc)

    def set_states(
        self,
        reads: NDArray[np.int32],
        writes: NDArray[np.int32],
        saves: NDArray[np.int32],
    ) -> None:
        """Set the blocks of states of the first B rows: [B], [B] and [B, M, 2]."""
        self._set_rows("state_reads", reads)
        self._set_rows("state_writes", writes)
        self._set_rows("state_saves", saves)

    def _set_rows(self, name: str, values: NDArray[np.int32]) -> None:
        """Set the first entries of a table of the next step."""
        table: Tensor = getattr(self._tables, name)
        self._offsets.append(np.array([table.storage_offset()]))
        self._sizes.append(np.array([values.size]))
        self._values.append(values.ravel())

    def apply(self) -> None:
        """Write the changes on the current stream, and clear them.

        Raises:
            ValueError: a value was set twice; nothing is written then.
        """
        if not self._offsets:
            return
        offsets, sizes = np.concatenate(self._offsets), np.concatenate(self._sizes)
        values = np.concatenate(self._values)
        self._offsets, self._sizes, self._values = [], [], []
        if not len(values):
            return
        order = np.argsort(offsets)
        if (offsets[order][1:] < (offsets + sizes)[order][:-1]).any():
            raise ValueError("writes: must not set a value twice")
        buffer = self._tables.buffer
        if device.runs_triton(buffer):
            _launch(buffer, offsets, sizes, values)
            return
        shift = np.repeat(offsets - np.cumsum(sizes) + sizes, sizes)
        buffer.numpy()[shift + np.arange(len(values))] = values

    def _put(
        self,
        name: str,
        slots: NDArray[np.int32],
        starts: NDArray[np.int32],
        start_loc: NDArray[Any],
        values: NDArray[np.int32],
        width: int,
    ) -> None:
        if not len(slots):
            return
        sizes = np.diff(start_loc).astype(np.int64)
        ends = starts + sizes
        _check_range("slots", slots, 0, self._tables.num_slots - 1)
        if starts.min() < 0 or ends.max() > width or sizes.min() < 0:
            raise ValueError(
                f"{name}: entries {starts.min()} to {ends.max()} exceed the width {width} of the "
                "table"
            )
        table: Tensor = getattr(self._tables, name)
        offset = table.storage_offset() * table.itemsize // 4
        filled = sizes > 0  # empty runs would seem to overlap others
        self._offsets.append((offset + slots.astype(np.int64) * width + starts)[filled])
        self._sizes.append(sizes[filled])
        self._values.append(values)


@triton.jit
def _kernel(buffer_ptr, chunks_ptr, values_ptr, CHUNK: tl.constexpr):
    i_chunk = tl.program_id(0)
    i_offset = tl.load(chunks_ptr + 4 * i_chunk)
    i_value = tl.load(chunks_ptr + 4 * i_chunk + 1)
    size = tl.load(chunks_ptr + 4 * i_chunk + 2)
    o = tl.arange(0, CHUNK)
    m = o < size
    b_values = tl.load(values_ptr + i_value + o, mask=m)  # [CHUNK]
    tl.store(buffer_ptr + i_offset + o, b_values, mask=m)


def settings() -> dict[str, int]:
    """Return chunk size and warps: 8 values per thread; most runs of values are short."""
    return {"CHUNK": 1024, "num_warps": 4}


def _launch(
    buffer: Tensor,
    offsets: NDArray[np.int64],
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
    chunks = np.stack([offsets[run] + offset, start + offset, rest, 0 * rest], axis=1)
    packed = upload(np.concatenate([chunks.ravel().view(np.int32), values]), buffer.device)
    _kernel[(len(run),)](
        buffer_ptr=buffer,
        chunks_ptr=packed[: 2 * chunks.size].view(torch.int64),
        values_ptr=packed[2 * chunks.size :],
        **settings(),
    )


def _check_range(name: str, values: NDArray[Any], lowest: int, highest: int | NDArray[Any]) -> None:
    wrong = (values < lowest) | (values > highest)
    if wrong.any():
        first = int(wrong.argmax())
        most = np.broadcast_to(highest, values.shape)[first]
        raise ValueError(f"{name}: must be {lowest} to {most} (got {values[first]})")
