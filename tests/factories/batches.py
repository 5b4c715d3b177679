"""Batches on the CPU, built from rows given by a test."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from engine.models.batch import Batch


@dataclass(frozen=True, slots=True)
class BatchRow:
    token_ids: Sequence[int]  # to be computed
    start: int  # position of the first of them
    block_ids: Sequence[int]


def build_batch(rows: Sequence[BatchRow], *, block_size: int) -> Batch:
    at = [
        (row, position)
        for row in rows
        for position in range(row.start, row.start + len(row.token_ids))
    ]
    counts = [len(row.token_ids) for row in rows]
    width = max(len(row.block_ids) for row in rows)
    tables = [[*row.block_ids, *[0] * (width - len(row.block_ids))] for row in rows]
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
        positions=torch.tensor([position for _, position in at]),
        slot_mapping=torch.tensor(
            [row.block_ids[p // block_size] * block_size + p % block_size for row, p in at]
        ),
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor([row.start + len(row.token_ids) for row in rows]).int(),
        block_tables=torch.tensor(tables).int(),
        num_decodes=len(list(takewhile(lambda count: count == 1, counts))),
    )
