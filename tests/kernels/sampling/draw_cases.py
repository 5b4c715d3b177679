"""Filters of a draw, and rows that use them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.draw import Settings
from kernels.step.sampling_columns import SAMPLING_COLUMNS
from kernels.step.seq_slot_tables import SeqSlotTables
from tests.kernels.slot_cases import empty_tables
from tests.kernels.support import DEVICE

# Several groups per tile, tiles per list and chunks per row, for rows of some hundreds of logits;
# two groups are too short a list for most rows.
SMALL = Settings(group=4, chunk=128, tile=32, fewest=2)

FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 2**31 - 1},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.95, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.5},
    {"top_k": 3, "min_p": 0.5},
    {"top_p": 0.8, "min_p": 0.02},
    {"top_k": 100, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 100, "top_p": 0.7, "min_p": 0.001, "temperature": 4.0},
]


class Rows(NamedTuple):
    """The arguments of `sample_tokens` except the logits."""

    tables: SeqSlotTables
    slots: Tensor

    @property
    def positions(self) -> Tensor:
        return (self.tables.num_tokens - self.tables.num_prompt_tokens)[self.slots].long()

    def take(self, rows: Tensor | slice) -> Rows:
        return Rows(self.tables, self.slots[rows])


def rows_of(filters: list[dict[str, float]], seed: int = 0) -> Rows:
    """Return one row per element of `filters`, each with its own seed and position."""
    tables = empty_tables(max(len(filters), 1))
    numbers = torch.arange(len(filters), device=DEVICE)
    neutral_values = {name: column.off for name, column in SAMPLING_COLUMNS.items()}
    for name, neutral in (neutral_values | {"temperature": 1.0}).items():
        values = [row.get(name, neutral) for row in filters]
        getattr(tables, name)[: len(filters)] = torch.tensor(values, device=DEVICE)
    tables.seeds[: len(filters)] = (numbers + 1 + 1000 * seed) * 0x9E3779B97F4A7C1
    tables.num_tokens[: len(filters)] = numbers * 5 + seed
    tables.num_prompt_tokens[: len(filters)] = numbers * 2
    return Rows(tables, numbers.int())
