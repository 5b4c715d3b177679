"""Slot tables for tests of the operations that read and change them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.step.sampling_columns import LENGTH, RUNNING, STOP
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.slot_writes import SlotWrites
from tests.kernels.support import DEVICE
from tests.kernels.vast_memory import vast_zeros


def empty_tables(num_slots: int, *, device: torch.device = DEVICE, **sizes: int) -> SeqSlotTables:
    """Return tables of zeros; a size that is not given is 1."""
    names = ("max_model_len", "max_blocks", "max_stop_token_ids", "max_biases", "vocab_size")
    given: dict[str, int] = {**dict.fromkeys(names, 1), **sizes}
    return SeqSlotTables.allocate(num_slots, device=device, **given)


def random_tables(
    num_slots: int,
    *,
    max_model_len: int = 60,
    block_size: int = 16,
    max_stop_token_ids: int = 4,
    vocab: int = 50,
    num_groups: int = 1,
    seed: int = 0,
    device: torch.device = DEVICE,
) -> SeqSlotTables:
    """Return tables in which each slot holds a sequence in a random state."""
    sizes = {
        "max_model_len": max_model_len,
        "max_blocks": -(-max_model_len // block_size),
        "max_stop_token_ids": max_stop_token_ids,
        "max_biases": 3,
        "vocab_size": 50,
        "num_groups": num_groups,
    }
    tables = empty_tables(num_slots, device=torch.device("cpu"), **sizes)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tables.token_ids.random_(0, vocab, generator=generator)
    tables.block_tables.random_(1, 10_000, generator=generator)
    tables.stop_token_ids.random_(0, vocab, generator=generator)
    for slot in range(num_slots):
        num_tokens = rng.randint(1, max_model_len)
        tables.stop_token_ids[slot, rng.randint(0, max_stop_token_ids) :] = -1
        tables.num_tokens[slot] = num_tokens
        tables.num_computed_tokens[slot] = rng.randint(0, num_tokens)
        tables.num_prompt_tokens[slot] = max(1, num_tokens - rng.randint(0, 4))
        tables.min_tokens[slot] = rng.randint(0, 4)
        tables.max_tokens[slot] = rng.randint(1, 6)
        tables.finish_reasons[slot] = rng.choice([RUNNING, RUNNING, RUNNING, STOP, LENGTH])
    found = empty_tables(num_slots, device=device, **sizes)
    found.buffer.copy_(tables.buffer)
    return found


def admit(
    writes: SlotWrites,
    slot: int,
    *,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    num_computed_tokens: int,
    min_tokens: int,
    max_tokens: int,
    stop_token_ids: Sequence[int],
    block_ids: Sequence[int],
    width: int = 4,
) -> None:
    """Admit one sequence; `width` is that of the table of stop tokens."""
    array = partial(np.array, dtype=np.int32)
    slots = array([slot])
    stops = [*stop_token_ids, *[-1] * (width - len(stop_token_ids))]
    writes.admit(
        slots,
        start_loc=array([0, len(token_ids)]),
        token_ids=array(token_ids),
        num_prompt_tokens=array([num_prompt_tokens]),
        num_computed_tokens=array([num_computed_tokens]),
        min_tokens=array([min_tokens]),
        max_tokens=array([max_tokens]),
        stop_token_ids=array([stops]),
    )
    set_blocks(writes, slot, 0, block_ids)


def set_blocks(writes: SlotWrites, slot: int, start: int, block_ids: Sequence[int]) -> None:
    """Set the block table of one slot from entry `start` on."""
    array = partial(np.array, dtype=np.int32)
    ends = array([0, len(block_ids)])
    writes.set_lists("block_tables", array([slot]), array([start]), ends, array(block_ids))


def vast_tables(monkeypatch: pytest.MonkeyPatch) -> SeqSlotTables:
    """Return three slots, the last of which starts beyond 2**31 tokens; most pages are unmapped."""
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", lambda size, **_: vast_zeros(4 * size).view(torch.int32))
        return empty_tables(3, max_model_len=2**30 + 64, max_blocks=2**24 + 1)


def assert_tables_equal(found: SeqSlotTables, expected: SeqSlotTables) -> None:
    for field in fields(SeqSlotTables):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        is_equal = torch.equal if isinstance(left, torch.Tensor) else int.__eq__
        assert is_equal(left, right), field.name


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def longs(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)
