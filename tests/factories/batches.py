"""Batches on the CPU, built from rows given by a test."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from engine.models.batch import Batch
from kernels.state.states import StepStates


@dataclass(frozen=True, slots=True)
class BatchRow:
    token_ids: Sequence[int]  # to be computed
    start: int  # position of the first of them
    block_ids: Sequence[int]
    state_reads: int = 0  # block of states that it reads
    state_writes: int = -1  # block of states that it writes
    state_saves: Sequence[tuple[int, int]] = ()  # positions, and blocks of the states there


def build_batch(rows: Sequence[BatchRow], *, block_size: int, keeps_states: bool = False) -> Batch:
    at = [
        (row, position)
        for row in rows
        for position in range(row.start, row.start + len(row.token_ids))
    ]
    counts = [len(row.token_ids) for row in rows]
    width = max(len(row.block_ids) for row in rows)
    tables = [[*row.block_ids, *[0] * (width - len(row.block_ids))] for row in rows]
    query_start_loc = torch.tensor([0, *counts]).cumsum(0).int()
    seq_lens = torch.tensor([row.start + len(row.token_ids) for row in rows]).int()
    return Batch(
        token_ids=torch.tensor([token for row in rows for token in row.token_ids]),
        positions=torch.tensor([position for _, position in at]),
        slot_mapping=torch.tensor(
            [row.block_ids[p // block_size] * block_size + p % block_size for row, p in at]
        ),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_tables=torch.tensor(tables).int(),
        num_decodes=len(list(takewhile(lambda count: count == 1, counts))),
        states=_step_states(rows, query_start_loc, seq_lens) if keeps_states else None,
    )


def _step_states(
    rows: Sequence[BatchRow], query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> StepStates:
    width = max(len(row.state_saves) for row in rows)
    saves = [[*row.state_saves, *[(0, -1)] * (width - len(row.state_saves))] for row in rows]
    return StepStates(
        query_start_loc,
        seq_lens,
        reads=torch.tensor([row.state_reads for row in rows]).int(),
        writes=torch.tensor([row.state_writes for row in rows]).int(),
        saves=torch.tensor(saves).int().view(len(rows), width, 2),
    )
