from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from kernels import device
from kernels.step.sampling_columns import LENGTH, RUNNING, SKIPPED, STOP
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.step_inputs import StepInputs, prepare_inputs, reference
from kernels.step.token_scatter import scatter_tokens
from tests.kernels.slot_cases import assert_tables_equal, ints, longs, random_tables, vast_tables
from tests.kernels.step.serving_simulation import Host
from tests.kernels.support import DEVICE, padded

# Scheduled tokens by slot; None: all remaining ones. A row of slot -1 is padding.
Rows = list[tuple[int, int | None]]

CASES: dict[str, tuple[Rows, int]] = {  # and padding tokens
    "one": ([(0, None)], 0),
    "no-rows": ([], 3),
    "nothing": ([], 0),
    "only-padding": ([(-1, 0), (-1, 0)], 2),
    "mixed": ([(3, None), (1, 1), (6, 2), (2, 1), (0, None), (4, 1), (5, None)], 0),
    "padded": ([(6, None), (-1, 0), (2, 1), (-1, 0), (-1, 0)], 5),
    "padding-with-tokens": ([(-1, 2), (1, None), (-1, 1)], 1),
    "no-tokens": ([(1, 0), (2, None), (3, 0)], 0),
    "more-than-known": ([(1, 70), (2, None)], 0),
}


def lay_out(tables: SeqSlotTables, rows: Rows) -> tuple[list[int], list[int]]:
    """Return slots and query_start_loc of the rows."""
    left = (tables.num_tokens - tables.num_computed_tokens).tolist()
    starts = [0]
    for slot, num_tokens in rows:
        starts.append(starts[-1] + (left[slot] if num_tokens is None else num_tokens))
    return [slot for slot, _ in rows], starts


def from_lists(
    tables: SeqSlotTables, slots: list[int], starts: list[int], num_tokens: int, block_size: int
) -> tuple[StepInputs, list[int]]:
    """Return the result of `reference`, computed token by token."""
    computed = tables.num_computed_tokens.tolist()
    known, reasons = tables.num_tokens.tolist(), tables.finish_reasons.tolist()
    num_groups, max_blocks = tables.num_groups, tables.max_blocks
    token_ids, positions = [0] * num_tokens, [0] * num_tokens
    slot_mapping = [-1] * num_groups * num_tokens
    seq_lens, logits_rows, sample_slots = [], [], []
    block_tables = torch.zeros(len(slots), tables.block_tables.shape[1], dtype=torch.int32)
    for i, slot in enumerate(slots):
        end = computed[slot] + starts[i + 1] - starts[i]
        idle = slot < 0 or starts[i] == starts[i + 1] or reasons[slot] or end > known[slot]
        seq_lens.append(0 if idle else end)
        logits_rows.append(0 if idle else starts[i + 1] - 1)
        sample_slots.append(-1 if idle or end < known[slot] else slot)
        if idle:
            continue
        for token_idx, position in enumerate(range(computed[slot], end), start=starts[i]):
            token_ids[token_idx] = int(tables.token_ids[slot, position])
            positions[token_idx] = position
            for group in range(num_groups):
                entry = group * max_blocks + position // block_size
                first = int(tables.block_tables[slot, entry]) * block_size
                slot_mapping[group * num_tokens + token_idx] = first + position % block_size
        num_blocks = -(-end // block_size)
        for group in range(num_groups):
            entries = slice(group * max_blocks, group * max_blocks + num_blocks)
            block_tables[i, entries] = tables.block_tables[slot, entries]
        computed[slot] = end
    inputs = StepInputs(
        token_ids=longs(*token_ids),
        positions=longs(*positions),
        slot_mapping=longs(*slot_mapping),
        seq_lens=ints(*seq_lens),
        block_tables=block_tables.to(DEVICE),
        logits_rows=longs(*logits_rows),
        sample_slots=ints(*sample_slots),
    )
    return inputs, computed


def assert_inputs_equal(found: StepInputs, expected: StepInputs) -> None:
    for field in fields(StepInputs):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        assert left.dtype == right.dtype, field.name
        assert torch.equal(left, right), field.name


def check(
    tables: SeqSlotTables, slots: list[int], starts: list[int], num_tokens: int, block_size: int
) -> None:
    """Compare the wrapper with `reference`; only `num_computed_tokens` may change."""
    before = tables.clone()
    arguments = ints(*slots), ints(*starts), num_tokens, block_size
    expected, computed = reference(tables, *arguments)
    assert_tables_equal(tables, before)
    assert_inputs_equal(prepare_inputs(tables, *arguments), expected)
    assert torch.equal(tables.num_computed_tokens, computed)
    tables.num_computed_tokens.copy_(before.num_computed_tokens)
    assert_tables_equal(tables, before)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("rows", "padding"), CASES.values(), ids=CASES.keys())
def test_the_reference_equals_plain_python(rows: Rows, padding: int, num_groups: int) -> None:
    tables = random_tables(7, num_groups=num_groups)
    slots, starts = lay_out(tables, rows)
    num_tokens = starts[-1] + padding
    found, computed = reference(tables, ints(*slots), ints(*starts), num_tokens, 16)
    expected, advanced = from_lists(tables, slots, starts, num_tokens, 16)
    assert_inputs_equal(found, expected)
    assert computed.tolist() == advanced


@pytest.mark.parametrize("form", ["triton", "torch"])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize(("rows", "padding"), CASES.values(), ids=CASES.keys())
def test_steps(
    rows: Rows, padding: int, num_groups: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form == "torch":
        monkeypatch.setattr(device, "runs_triton", lambda tensor: False)
    tables = random_tables(7, num_groups=num_groups)
    slots, starts = lay_out(tables, rows)
    check(tables, slots, starts, starts[-1] + padding, 16)


@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
def test_more_tokens_and_blocks_than_a_programs_tile(block_size: int) -> None:
    tables = random_tables(3, max_model_len=4000, block_size=block_size, num_groups=2)
    tables.finish_reasons.fill_(RUNNING)
    tables.num_tokens.copy_(ints(3333, 4000, 2048))
    tables.num_computed_tokens.copy_(ints(0, 3999, 1000))
    check(tables, [1, 0, 2], [0, 1, 3334, 4382], 4382 + 1100, block_size)


def test_a_sequence_that_has_ended_is_left_alone() -> None:
    tables = random_tables(2)
    tables.num_tokens.fill_(20)
    tables.num_computed_tokens.fill_(19)
    tables.finish_reasons.copy_(ints(RUNNING, STOP))
    inputs = prepare_inputs(tables, ints(1, 0), ints(0, 1, 2), 2, 16)
    assert inputs.seq_lens.tolist() == [0, 20]
    assert inputs.sample_slots.tolist() == [-1, 0]
    assert inputs.slot_mapping[0] == -1
    assert inputs.slot_mapping[1] == tables.block_tables[0, 1] * 16 + 3
    assert tables.num_computed_tokens.tolist() == [20, 19]


def test_tokens_that_are_not_known_yet_are_not_computed() -> None:
    tables = random_tables(2)
    tables.finish_reasons.fill_(RUNNING)
    tables.num_tokens.fill_(20)
    tables.num_computed_tokens.copy_(ints(20, 18))
    inputs = prepare_inputs(tables, ints(0, 1), ints(0, 1, 4), 4, 16)
    assert inputs.seq_lens.tolist() == [0, 0]
    assert inputs.slot_mapping.tolist() == [-1] * 4
    assert tables.num_computed_tokens.tolist() == [20, 18]


def test_given_buffers_are_used_and_blocks_behind_a_sequence_are_left() -> None:
    tables = random_tables(7)
    tables.finish_reasons.fill_(RUNNING)
    slots, starts = lay_out(tables, [(2, 1), (5, 1), (-1, 0)])
    out = StepInputs.allocate(3, 4, max_blocks=4, device=DEVICE)
    assert not out.block_tables.any()  # entries that are never written must be valid block ids
    out.block_tables.fill_(77)
    addresses = [getattr(out, field.name).data_ptr() for field in fields(out)]
    expected, _ = reference(tables, ints(*slots), ints(*starts), 4, 16)
    assert prepare_inputs(tables, ints(*slots), ints(*starts), 4, 16, out=out) is out
    assert [getattr(out, field.name).data_ptr() for field in fields(out)] == addresses
    owned = expected.block_tables != 0
    left = torch.where(owned, expected.block_tables, 77)
    assert_inputs_equal(out, replace(expected, block_tables=left))


def test_numbers_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = vast_tables(monkeypatch)
    tables.num_tokens[2], tables.num_computed_tokens[2] = 131, 129
    tables.token_ids[2, 129:131] = ints(7, 8)
    tables.block_tables[2, 2] = 2**26 + 3
    inputs = prepare_inputs(tables, ints(2), ints(0, 2), 2, 64)
    assert inputs.token_ids.tolist() == [7, 8]
    assert inputs.positions.tolist() == [129, 130]
    assert inputs.slot_mapping.tolist() == [(2**26 + 3) * 64 + 1, (2**26 + 3) * 64 + 2]
    assert inputs.block_tables[0, :4].tolist() == [0, 0, 2**26 + 3, 0]
    assert tables.num_computed_tokens.tolist() == [0, 0, 131]


def test_a_step_can_be_repeated_without_the_host() -> None:
    """As in a CUDA graph on a GPU: nothing depends on values that only the device knows."""
    tables = random_tables(2)
    tables.finish_reasons.fill_(RUNNING)
    for table, value in ((tables.num_tokens, 15), (tables.num_computed_tokens, 14)):
        table.fill_(value)
    tables.num_prompt_tokens.fill_(15)
    tables.max_tokens.copy_(ints(3, 2))
    tables.stop_token_ids.fill_(-1)
    slots, starts, token_ids = ints(1, 0, -1), ints(0, 1, 2, 2), longs(5, 6, 7)
    out = StepInputs.allocate(3, 4, max_blocks=4, device=DEVICE)

    def step() -> torch.Tensor:
        prepare_inputs(tables, slots, starts, 4, 16, out=out)
        return scatter_tokens(tables, out.sample_slots, token_ids)

    repeat = step
    if DEVICE.type == "cuda":
        before = tables.clone()
        step()  # compile the kernels first
        tables.buffer.copy_(before.buffer)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reasons = step()

        def repeat() -> torch.Tensor:
            graph.replay()
            return reasons

    found = []
    for _ in range(4):
        reached = repeat().tolist()
        found.append((out.positions.tolist(), out.seq_lens.tolist(), reached))
    assert found == [
        ([14, 14, 0, 0], [15, 15, 0], [RUNNING, RUNNING, SKIPPED]),
        ([15, 15, 0, 0], [16, 16, 0], [LENGTH, RUNNING, SKIPPED]),
        ([0, 16, 0, 0], [0, 17, 0], [SKIPPED, LENGTH, SKIPPED]),
        ([0, 0, 0, 0], [0, 0, 0], [SKIPPED, SKIPPED, SKIPPED]),
    ]
    assert tables.token_ids[0, 15:18].tolist() == [6, 6, 6]
    assert tables.token_ids[1, 15:17].tolist() == [5, 5]


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_serving_one_step_ahead(block_size: int) -> None:
    host = Host(block_size, num_sequences=6, block_size=block_size)
    host.run()
    assert host.num_wasted > 0  # otherwise the tested case has not occurred


def test_wrong_arguments_are_named() -> None:
    tables = random_tables(3)
    slots, starts = ints(0, 1), ints(0, 1, 2)
    for arguments, message in (
        ((slots[None], starts, 2, 16), "slots: must have shape"),
        ((slots.long(), starts, 2, 16), r"slots: must be torch\.int32"),
        ((slots.to("meta"), starts, 2, 16), "slots: must be on"),
        ((ints(0, 9, 1, 9)[::2], starts, 2, 16), "slots: must be contiguous"),
        ((slots, starts[:2], 2, 16), r"query_start_loc: must have shape \[3\]"),
        ((slots, starts.long(), 2, 16), r"query_start_loc: must be torch\.int32"),
        ((slots, starts.to("meta"), 2, 16), "query_start_loc: must be on"),
        ((slots, ints(0, 9, 1, 9, 2)[::2], 2, 16), "query_start_loc: must be contiguous"),
        ((slots, starts, -1, 16), "num_tokens_padded: must not be negative"),
        ((slots, starts, 2, 0), "block_size: must be positive"),
        ((slots, starts, 2, 8), "tables: 4 blocks of 8 tokens cannot hold max_model_len, 60"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_inputs(tables, *arguments)


def test_wrong_buffers_are_named() -> None:
    tables = random_tables(3)
    good = StepInputs.allocate(2, 2, max_blocks=4, device=DEVICE)
    for field in fields(StepInputs):
        name, tensor = field.name, getattr(good, field.name)
        for wrong, message in (
            (tensor[:1], "must have shape"),
            (tensor.short(), "must be torch"),
            (tensor.to("meta"), "must be on"),
            (padded(tensor[:, None])[:, 0] if tensor.dim() == 1 else padded(tensor), "contiguous"),
        ):
            with pytest.raises(ValueError, match=rf"out\.{name}: .*{message}"):
                prepare_inputs(
                    tables, ints(0, 1), ints(0, 1, 2), 2, 16, out=replace(good, **{name: wrong})
                )
