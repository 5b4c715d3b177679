from __future__ import annotations

import random

import pytest
import torch

from kernels import device
from kernels.step.sampling_columns import LENGTH, RUNNING, SKIPPED, STOP
from kernels.step.seq_slot_tables import SeqSlotTables
from kernels.step.token_scatter import reference, scatter_tokens
from tests.kernels.slot_cases import (
    assert_tables_equal,
    ints,
    longs,
    random_tables,
    vast_tables,
)

PROMPT = 5
# Output tokens so far, min_tokens, max_tokens, stop tokens, next token -> finish reason.
RULES: dict[str, tuple[int, int, int, list[int], int, int]] = {
    "goes-on": (0, 0, 4, [7], 3, RUNNING),
    "stop-token": (0, 0, 4, [7], 7, STOP),
    "last-of-the-stop-tokens": (2, 0, 4, [3, 9, 11, 7], 7, STOP),
    "ignored-eos": (2, 0, 4, [], 7, RUNNING),
    "stop-token-before-min-tokens": (0, 2, 4, [7], 7, RUNNING),
    "stop-token-as-last-of-min-tokens": (1, 2, 4, [7], 7, RUNNING),
    "stop-token-behind-min-tokens": (2, 2, 4, [7], 7, STOP),
    "length": (3, 0, 4, [7], 3, LENGTH),
    "one-before-length": (2, 0, 4, [7], 3, RUNNING),
    "stop-token-at-the-length": (3, 0, 4, [7], 7, STOP),
    "stop-token-at-the-length-before-min-tokens": (3, 4, 4, [7], 7, LENGTH),
    "only-token": (0, 0, 1, [], 3, LENGTH),
    "token-0-is-a-token": (0, 0, 4, [0], 0, STOP),
    "last-of-the-row": (14, 0, 100, [7], 3, LENGTH),
    "stop-token-as-last-of-the-row": (14, 0, 100, [7], 7, STOP),
}


def tables_of(
    num_outputs: int, min_tokens: int, max_tokens: int, stop_token_ids: list[int]
) -> SeqSlotTables:
    """Return three slots, the middle one as described, of at most 20 tokens."""
    tables = random_tables(3, max_model_len=20)
    tables.num_prompt_tokens[1] = PROMPT
    tables.num_tokens[1] = PROMPT + num_outputs
    tables.min_tokens[1], tables.max_tokens[1] = min_tokens, max_tokens
    tables.stop_token_ids[1] = ints(*stop_token_ids, *[-1] * (4 - len(stop_token_ids)))
    tables.finish_reasons[1] = RUNNING
    return tables


def from_lists(
    tables: SeqSlotTables, slots: list[int], token_ids: list[int]
) -> tuple[SeqSlotTables, list[int]]:
    """Return the result of `reference`, computed per sequence."""
    tables = tables.clone()
    reasons = []
    for slot, token_id in zip(slots, token_ids, strict=True):
        num_tokens = int(tables.num_tokens[slot])
        if slot < 0 or tables.finish_reasons[slot] or num_tokens == tables.max_model_len:
            reasons.append(SKIPPED)
            continue
        num_tokens += 1
        tables.token_ids[slot, num_tokens - 1] = token_id
        tables.num_tokens[slot] = num_tokens
        num_outputs = num_tokens - int(tables.num_prompt_tokens[slot])
        reason = RUNNING
        if token_id in tables.stop_token_ids[slot].tolist() and (
            num_outputs > int(tables.min_tokens[slot])
        ):
            reason = STOP
        elif num_outputs >= int(tables.max_tokens[slot]) or num_tokens == tables.max_model_len:
            reason = LENGTH
        tables.finish_reasons[slot] = reason
        reasons.append(reason)
    return tables, reasons


@pytest.fixture(params=["triton", "torch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test on the kernel and on the CPU implementations."""
    if request.param == "torch":
        monkeypatch.setattr(device, "runs_triton", lambda tensor: False)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rules(rule: tuple[int, int, int, list[int], int, int]) -> None:
    *state, token_id, reason = rule
    tables = tables_of(*state)
    expected = tables.clone()
    position = PROMPT + state[0]
    expected.token_ids[1, position] = token_id
    expected.num_tokens[1] = position + 1
    expected.finish_reasons[1] = reason
    reasons = scatter_tokens(tables, ints(1), longs(token_id))
    assert reasons.dtype == torch.int32
    assert reasons.tolist() == [reason]
    assert_tables_equal(tables, expected)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("reason", [STOP, LENGTH])
def test_a_sequence_that_has_ended_takes_nothing(reason: int) -> None:
    tables = tables_of(2, 0, 4, [7])
    tables.finish_reasons[1] = reason
    before = tables.clone()
    assert scatter_tokens(tables, ints(1, -1), longs(7, 7)).tolist() == [SKIPPED, SKIPPED]
    assert_tables_equal(tables, before)


@pytest.mark.usefixtures("form")
def test_a_full_row_takes_nothing() -> None:
    tables = tables_of(15, 0, 100, [])
    before = tables.clone()
    assert scatter_tokens(tables, ints(1), longs(3)).tolist() == [SKIPPED]
    assert_tables_equal(tables, before)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("max_stop_token_ids", [1, 3, 130])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 200])
def test_many_rows(num_rows: int, max_stop_token_ids: int) -> None:
    tables = random_tables(250, max_stop_token_ids=max_stop_token_ids, vocab=8)
    rng = random.Random(num_rows)
    slots = [slot if rng.random() < 0.8 else -1 for slot in rng.sample(range(250), num_rows)]
    token_ids = [rng.randrange(8) for _ in slots]
    before = tables.clone()
    expected, reasons = reference(tables, ints(*slots), longs(*token_ids))
    assert_tables_equal(tables, before)
    in_lists = from_lists(tables, slots, token_ids)
    assert_tables_equal(expected, in_lists[0])
    assert reasons.tolist() == in_lists[1]
    if num_rows == 200:
        assert {SKIPPED, RUNNING, STOP, LENGTH} == set(reasons.tolist())
    assert torch.equal(scatter_tokens(tables, ints(*slots), longs(*token_ids)), reasons)
    assert_tables_equal(tables, expected)


def test_places_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = vast_tables(monkeypatch)
    tables.num_tokens[2], tables.num_prompt_tokens[2], tables.max_tokens[2] = 9, 3, 100
    assert scatter_tokens(tables, ints(2), longs(4)).tolist() == [RUNNING]
    assert tables.token_ids[2, 8:11].tolist() == [0, 4, 0]
    assert tables.num_tokens.tolist() == [0, 0, 10]


def test_wrong_arguments_are_named() -> None:
    tables = random_tables(3)
    slots, token_ids = ints(0, 1), longs(5, 6)
    for arguments, message in (
        ((slots[None], token_ids), "slots: must have shape"),
        ((slots.long(), token_ids), r"slots: must be torch\.int32"),
        ((slots.to("meta"), token_ids), "slots: must be on"),
        ((ints(0, 9, 1, 9)[::2], token_ids), "slots: must be contiguous"),
        ((slots, token_ids[:1]), r"token_ids: must have shape \[2\]"),
        ((slots, token_ids.int()), r"token_ids: must be torch\.int64"),
        ((slots, token_ids.to("meta")), "token_ids: must be on"),
        ((slots, longs(5, 9, 6, 9)[::2]), "token_ids: must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            scatter_tokens(tables, *arguments)
