"""Batch: the tensors of one step, built once, immutable, passed down explicitly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass over B sequences with T tokens in all, decode and prefill mixed.

    Sequence i owns tokens `query_start_loc[i]:query_start_loc[i + 1]`. They are the last ones of
    its `seq_lens[i]` tokens; the KV of those before them is in the cache already. Sequences with
    one token come first.

    Attributes:
        token_ids: int64 [T].
        positions: int64 [T], place of each token in its sequence, from 0.
        slot_mapping: int64 [T], where its KV goes: block id * block_size + offset.
        query_start_loc: int32 [B + 1], on the CPU.
        seq_lens: int32 [B], tokens of the sequence with those of this step, on the CPU.
        block_tables: int32 [B, max blocks], on the CPU; padded with the null block 0.
        logits_rows: int64 [R], tokens whose successor is wanted.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    logits_rows: Tensor


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One scheduled sequence, as the batch builder needs it."""

    token_ids: Sequence[int]  # the tokens to compute now
    start: int  # position of the first of them: num_computed_tokens
    block_ids: Sequence[int]
    wants_logits: bool


def build_batch(rows: Sequence[BatchRow], *, block_size: int, device: torch.device) -> Batch:
    """Lay the rows out as one `Batch` with its token tensors on `device`.

    Rows with one token must come first.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_start_loc = [0]
    seq_lens: list[int] = []
    logits_rows: list[int] = []
    for row in rows:
        end = row.start + len(row.token_ids)
        token_ids.extend(row.token_ids)
        positions.extend(range(row.start, end))
        slots.extend(
            row.block_ids[position // block_size] * block_size + position % block_size
            for position in range(row.start, end)
        )
        query_start_loc.append(len(token_ids))
        seq_lens.append(end)
        if row.wants_logits:
            logits_rows.append(len(token_ids) - 1)
    width = max(len(row.block_ids) for row in rows)
    tables = [list(row.block_ids) + [0] * (width - len(row.block_ids)) for row in rows]
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
    )
