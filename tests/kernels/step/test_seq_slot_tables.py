from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from kernels import device
from kernels.step.sampling_columns import LENGTH, RUNNING
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.slot_writes import SlotWrites
from tests.kernels import slot_cases
from tests.kernels.slot_cases import (
    assert_tables_equal,
    ints,
    random_tables,
    set_blocks,
    vast_tables,
)
from tests.kernels.support import DEVICE

NAMES = [
    field.name for field in fields(SeqSlotTables) if field.name not in ("num_groups", "buffer")
]


def admit(writes: SlotWrites, slot: int = 1, **changes: Any) -> None:
    arguments: dict[str, Any] = {
        "token_ids": [5, 6, 7],
        "num_prompt_tokens": 2,
        "num_computed_tokens": 1,
        "min_tokens": 3,
        "max_tokens": 9,
        "stop_token_ids": [8, 2],
        "block_ids": [40, 41],
    }
    slot_cases.admit(writes, slot, **{**arguments, **changes})


@pytest.fixture(params=["triton", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test on the kernel and on the CPU implementations."""
    if request.param == "torch":
        if DEVICE.type == "cuda":
            pytest.skip("writes to tables in the CPU's memory")
        monkeypatch.setattr(device, "runs_triton", lambda tensor: False)


def test_tables_are_zero_and_share_nothing() -> None:
    tables = SeqSlotTables.allocate(
        3,
        max_model_len=7,
        max_blocks=2,
        max_stop_token_ids=5,
        max_biases=6,
        vocab_size=70,
        device=DEVICE,
        max_state_saves=4,
    )
    assert tables.num_slots == 3
    assert tables.state_saves.shape == (3, 4, 2)
    assert tables.max_model_len == 7
    assert tables.token_ids.shape == (3, 7)
    assert tables.block_tables.shape == (3, 2)
    assert tables.stop_token_ids.shape == (3, 5)
    assert tables.bias_token_ids.shape == tables.bias_values.shape == (3, 6)
    assert tables.allowed_tokens.shape == (3, 3)
    assert not tables.buffer.any()
    for number, name in enumerate(NAMES, start=1):
        assert getattr(tables, name).is_contiguous()
        getattr(tables, name).fill_(number)
    for number, name in enumerate(NAMES, start=1):
        assert (getattr(tables, name) == number).all(), name
        assert getattr(tables, name).is_contiguous()
        assert getattr(tables, name).data_ptr() % 128 == tables.buffer.data_ptr() % 128


def test_a_clone_is_equal_and_its_own() -> None:
    tables = random_tables(3)
    copy = tables.clone()
    assert_tables_equal(copy, tables)
    copy.buffer.zero_()
    assert tables.buffer.any()


@pytest.mark.usefixtures("form")
def test_admission_writes_the_whole_slot_and_no_other() -> None:
    tables = random_tables(4)
    tables.finish_reasons[1] = LENGTH
    expected = tables.clone()
    expected.token_ids[1, :3] = ints(5, 6, 7)
    expected.block_tables[1, :2] = ints(40, 41)
    expected.stop_token_ids[1] = ints(8, 2, -1, -1)
    for name, value in {
        "num_tokens": 3,
        "num_prompt_tokens": 2,
        "num_computed_tokens": 1,
        "min_tokens": 3,
        "max_tokens": 9,
        "finish_reasons": RUNNING,
        "num_counted_tokens": 0,
    }.items():
        getattr(expected, name)[1] = value
    writes = SlotWrites(tables)
    admit(writes)
    assert not torch.equal(tables.buffer, expected.buffer)  # nothing is written before `apply`
    writes.apply()
    assert_tables_equal(tables, expected)
    tables.buffer.zero_()
    writes.apply()  # no changes are left
    assert not tables.buffer.any()


@pytest.mark.usefixtures("form")
def test_many_changes_at_once() -> None:
    """Longer than a program's chunk, exactly one chunk, and short ones between them."""
    tables = random_tables(5, max_model_len=3000, block_size=1)
    expected = tables.clone()
    long, exact = list(range(2500)), list(range(7, 7 + 1024))
    writes = SlotWrites(tables)
    admit(writes, 4, token_ids=long, block_ids=[])
    admit(writes, 0, token_ids=exact, block_ids=exact)
    set_blocks(writes, 2, 2990, [3])
    set_blocks(writes, 2, 2991, [4, 5])
    set_blocks(writes, 2, 2990, [])
    set_blocks(writes, 2, 2991, [])
    writes.apply()
    expected.token_ids[4, :2500] = ints(*long)
    expected.token_ids[0, :1024] = ints(*exact)
    expected.block_tables[0, :1024] = ints(*exact)
    expected.block_tables[2, 2990:2993] = ints(3, 4, 5)
    assert torch.equal(tables.token_ids, expected.token_ids)
    assert torch.equal(tables.block_tables, expected.block_tables)
    assert tables.num_tokens[[4, 0]].tolist() == [2500, 1024]


@pytest.mark.usefixtures("form")
def test_a_value_set_twice_is_refused_and_discarded() -> None:
    tables = random_tables(4)
    before = tables.clone()
    writes = SlotWrites(tables)
    set_blocks(writes, 1, 0, [7, 8])
    set_blocks(writes, 1, 1, [9])
    with pytest.raises(ValueError, match="must not set a value twice"):
        writes.apply()
    writes.apply()
    assert_tables_equal(tables, before)


def test_places_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = vast_tables(monkeypatch)
    writes = SlotWrites(tables)
    admit(writes, 2, stop_token_ids=[8], width=1)
    writes.apply()
    assert tables.token_ids[2, :4].tolist() == [5, 6, 7, 0]
    assert tables.block_tables[2, :3].tolist() == [40, 41, 0]
    assert tables.num_tokens.tolist() == [0, 0, 3]


def test_wrong_sizes_are_named() -> None:
    sizes = {"num_slots": 1, "max_model_len": 1, "max_blocks": 1, "max_stop_token_ids": 1}
    sizes |= {"max_biases": 1, "vocab_size": 1}
    for name in sizes:
        arguments = {**sizes, name: 0}
        with pytest.raises(ValueError, match=f"{name}: must be positive"):
            SeqSlotTables.allocate(arguments.pop("num_slots"), **arguments, device=DEVICE)


def test_wrong_changes_are_named() -> None:
    writes = SlotWrites(random_tables(4))
    for changes, message in (
        ({"slot": 4}, "slots: must be 0 to 3"),
        ({"slot": -1}, "slots: must be 0 to 3"),
        ({"token_ids": []}, "token_ids: must be 1 to 60"),
        ({"token_ids": [1] * 61}, "token_ids: must be 1 to 60"),
        ({"num_prompt_tokens": 0}, "num_prompt_tokens: must be 1 to 3"),
        ({"num_prompt_tokens": 4}, "num_prompt_tokens: must be 1 to 3"),
        ({"num_computed_tokens": 3}, "num_computed_tokens: must be 0 to 2"),
        ({"min_tokens": -1}, "min_tokens: must be 0"),
        ({"max_tokens": 0}, "max_tokens: must be 1"),
        ({"stop_token_ids": [1] * 5}, r"stop_token_ids: must have shape \[1, 4\]"),
        ({"block_ids": [1] * 5}, "block_tables: entries 0 to 5 exceed the width 4"),
    ):
        with pytest.raises(ValueError, match=message):
            admit(writes, **changes)
    with pytest.raises(ValueError, match="block_tables: entries 3 to 5 exceed"):
        set_blocks(writes, 1, 3, [1, 2])
    with pytest.raises(ValueError, match="block_tables: entries -1 to 0 exceed"):
        set_blocks(writes, 1, -1, [1])
    with pytest.raises(ValueError, match="slots: must be 0 to 3"):
        set_blocks(writes, 4, 0, [1])
