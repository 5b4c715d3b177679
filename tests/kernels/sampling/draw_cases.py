"""Filters of a draw, and rows that use them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.sampling.draw import Settings
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

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    num_tokens: Tensor
    num_prompt_tokens: Tensor

    @property
    def positions(self) -> Tensor:
        return (self.num_tokens - self.num_prompt_tokens).long()

    def take(self, rows: Tensor | slice) -> Rows:
        return Rows(*(column[rows] for column in self))


def rows_of(filters: list[dict[str, float]], seed: int = 0) -> Rows:
    """Return one row per element of `filters`, each with its own seed and position."""

    def column(name: str, neutral: float, dtype: torch.dtype) -> Tensor:
        values = [row.get(name, neutral) for row in filters]
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    numbers = torch.arange(len(filters), device=DEVICE)
    return Rows(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seeds=(numbers + 1 + 1000 * seed) * 0x9E3779B97F4A7C1,
        num_tokens=(numbers * 5 + seed).int(),
        num_prompt_tokens=(numbers * 2).int(),
    )
