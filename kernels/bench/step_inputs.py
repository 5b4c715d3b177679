"""Preparation of a decode step's inputs, next to torch operations. Measures latency."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import torch
from torch import Tensor

from kernels.bench.case import Case, Work, numel_bytes
from kernels.slot_tables import SlotTables
from kernels.step_inputs import StepInputs, prepare_inputs

_BLOCK_SIZE = 16
_STOP_TOKENS = 4


def tables(rows: int, length: int, known: int, device: torch.device) -> SlotTables:
    """Return tables of `rows` running sequences with `known` of up to `length` tokens.

    Every step advances them; they have room for as many steps as are measured.
    """
    found = SlotTables.allocate(
        rows,
        max_model_len=length,
        max_blocks=length // _BLOCK_SIZE,
        max_stop_token_ids=_STOP_TOKENS,
        max_biases=1,
        vocab_size=1,
        device=device,
    )
    found.token_ids.copy_(torch.arange(length, device=device))
    blocks = torch.randperm(rows * (length // _BLOCK_SIZE)).view(rows, -1)
    found.block_tables.copy_(blocks)
    found.stop_token_ids.fill_(-1)
    found.num_tokens.fill_(known)
    found.num_prompt_tokens.fill_(1)
    found.max_tokens.fill_(length)
    return found


def _decode(rows: int, computed: int, length: int, device: torch.device) -> Work:
    found = tables(rows, length, length, device)
    found.num_computed_tokens.fill_(computed)
    slots = torch.randperm(rows).to(device, torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
    max_blocks = found.block_tables.shape[1]
    out = StepInputs.allocate(rows, rows, max_blocks=max_blocks, device=device)
    block_ids = rows * (computed // _BLOCK_SIZE + 1)
    return Work(
        ours=partial(_ours, found, slots, starts, out),
        peers={"eager": partial(_torch, found, slots)},
        bytes=2 * 4 * block_ids + numel_bytes(out.token_ids, out.positions, out.slot_mapping),
        written=(found.num_computed_tokens,),
    )


def _ours(tables: SlotTables, slots: Tensor, starts: Tensor, out: StepInputs) -> tuple[Tensor, ...]:
    prepare_inputs(tables, slots, starts, len(slots), _BLOCK_SIZE, out=out)
    return tuple(getattr(out, field.name) for field in fields(out))


def _torch(tables: SlotTables, slots: Tensor) -> tuple[Tensor, ...]:
    """Prepare decode rows (one token each) of sequences that all run."""
    slot = slots.long()
    position = tables.num_computed_tokens[slot].long()
    seq_lens = position + 1
    tables.num_computed_tokens[slot] = seq_lens.int()
    block_tables = tables.block_tables[slot]
    block = block_tables.gather(1, (position // _BLOCK_SIZE)[:, None])[:, 0].long()
    entry = torch.arange(block_tables.shape[1], device=slots.device)
    owned = entry < (seq_lens[:, None] + _BLOCK_SIZE - 1) // _BLOCK_SIZE
    return (
        tables.token_ids[slot, position].long(),
        position,
        block * _BLOCK_SIZE + position % _BLOCK_SIZE,
        seq_lens.int(),
        torch.where(owned, block_tables, 0),
        torch.arange(len(slots), device=slots.device),
        torch.where(seq_lens == tables.num_tokens[slot], slots, -1),
    )


CASES = [
    Case(
        operation="step_inputs",
        name=f"decode {rows} x 1k",
        build=_decode,
        shape={"rows": rows, "computed": 1024, "length": 8192},
        tiny={"rows": 5, "computed": 21, "length": 64},
    )
    for rows in (256, 64, 1)
]
