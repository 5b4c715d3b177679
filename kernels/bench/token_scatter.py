"""Appending sampled tokens, next to torch operations. Measures latency."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import Case, Work
from kernels.bench.step_inputs import tables
from kernels.slot_tables import LENGTH, RUNNING, STOP, SlotTables
from kernels.token_scatter import SKIPPED, scatter_tokens


def _scatter(rows: int, known: int, length: int, device: torch.device) -> Work:
    found = tables(rows, length, known, device)
    slots = torch.randperm(rows).to(device, torch.int32)
    token_ids = torch.arange(1000, 1000 + rows, device=device)
    found.stop_token_ids[slots[0], 1] = 1000  # one sequence ends
    # Per row: 8 values read and written in the tables, and its stop tokens.
    values = rows * (8 + found.stop_token_ids.shape[1])
    return Work(
        ours=partial(scatter_tokens, found, slots, token_ids),
        peers={"eager": partial(_torch, found, slots, token_ids)},
        bytes=4 * values,
        written=(found.token_ids, found.num_tokens, found.finish_reasons),
    )


def _torch(tables: SlotTables, slots: Tensor, token_ids: Tensor) -> Tensor:
    """Append without a host synchronisation: rows that take nothing write back what was there."""
    slot, last = slots.long(), tables.max_model_len - 1
    place = tables.num_tokens[slot].long()
    reason = tables.finish_reasons[slot]
    takes = (reason == RUNNING) & (place <= last)
    outputs = place + 1 - tables.num_prompt_tokens[slot]
    stops = (tables.stop_token_ids[slot] == token_ids[:, None]).any(-1)
    stops &= outputs > tables.min_tokens[slot]
    ends = (outputs >= tables.max_tokens[slot]) | (place == last)
    found = torch.where(stops, STOP, torch.where(ends, LENGTH, RUNNING)).int()
    there = tables.token_ids[slot, place.clamp(max=last)]
    tables.token_ids[slot, place.clamp(max=last)] = torch.where(takes, token_ids.int(), there)
    tables.num_tokens[slot] = (place + takes).int()
    tables.finish_reasons[slot] = torch.where(takes, found, reason)
    return torch.where(takes, found, SKIPPED).int()


CASES = [
    Case(
        operation="token_scatter",
        name=f"{rows} rows",
        build=_scatter,
        shape={"rows": rows, "known": 1024, "length": 8192},
        tiny={"rows": 5, "known": 21, "length": 64},
    )
    for rows in (256, 64, 1)
]
