from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.sampling.token_counts import TokenCounts, count_tokens
from kernels.step.sampling_columns import PENALTIES
from kernels.step.seq_slot_tables import SeqSlotTables
from tests.kernels.slot_cases import empty_tables
from tests.kernels.support import DEVICE
from tests.kernels.vast_memory import vast_zeros

VOCAB = 1100  # more than one block, and a last word with 12 bits
LONG = 2500  # prompt length, more than one block


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        if DEVICE.type != "cpu":
            pytest.skip("serves the CPU only")
        monkeypatch.setattr(device, "runs_triton", lambda tensor: False)


def make_tables(num_slots: int = 4) -> SeqSlotTables:
    """Return tables whose sequences all have penalties, and no tokens."""
    tables = empty_tables(num_slots, max_model_len=2 * LONG, vocab_size=VOCAB)
    tables.features.fill_(PENALTIES | 1)
    return tables


def admit(
    tables: SeqSlotTables, slot: int, prompt: Sequence[int], output: Sequence[int] = ()
) -> None:
    tables.num_prompt_tokens[slot], tables.num_tokens[slot] = len(prompt), len(prompt)
    tables.num_counted_tokens[slot] = 0
    tables.token_ids[slot, : len(prompt)] = ints(prompt)
    append(tables, slot, output)


def append(tables: SeqSlotTables, slot: int, output: Sequence[int]) -> None:
    start = int(tables.num_tokens[slot])
    tables.token_ids[slot, start : start + len(output)] = ints(output)
    tables.num_tokens[slot] += len(output)


def full(num_slots: int = 4) -> TokenCounts:
    """Return tables with counts left by earlier sequences."""
    counts = TokenCounts.allocate(num_slots, VOCAB, DEVICE)
    counts.prompt_mask.fill_(1 << 30)
    counts.output_counts.fill_(5)
    return counts


def tokens_of(counts: TokenCounts, slot: int) -> list[int]:
    words = counts.prompt_mask[slot].tolist()
    return [32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def output_of(counts: TokenCounts, slot: int) -> dict[int, int]:
    row = counts.output_counts[slot]
    return {token: int(row[token]) for token in row.nonzero()[:, 0].tolist()}


def ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


@pytest.mark.usefixtures("forms")
def test_a_new_sequence_is_counted_whole_and_clears_the_slot() -> None:
    # One slot more before the first, so that writes to slot -1 are noticed.
    whole, tables = full(6), make_tables(5)
    counts = TokenCounts(*(table[1:] for table in whole))
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(VOCAB, (LONG,), generator=generator).tolist()
    said = [(3 * i) % 7 - 1 for i in range(1200)]
    admit(tables, 2, long, said)
    admit(tables, 0, [0, 31, 32, 63, VOCAB - 1, 31])
    admit(tables, 3, [7, -1, VOCAB, 2**31 - 1], [VOCAB - 1, VOCAB, 7, VOCAB - 1])
    admit(tables, 1, [5])
    admit(tables, 4, [5])
    tables.features[4] = ~PENALTIES
    count_tokens(counts, tables, ints([2, 0, -1, 3, 4]))
    assert tokens_of(counts, 2) == sorted(set(long))
    assert tokens_of(counts, 0) == [0, 31, 32, 63, VOCAB - 1]
    assert tokens_of(counts, 3) == [7]
    assert output_of(counts, 2) == {token: said.count(token) for token in range(6)}
    assert output_of(counts, 0) == {}
    assert output_of(counts, 3) == {VOCAB - 1: 2, 7: 1}
    assert tables.num_counted_tokens.tolist() == [6, 0, LONG + 1200, 8, 0]
    for untouched in (0, 2, 5):  # slot -1, one that has no row, and one without penalties
        assert (whole.prompt_mask[untouched] == 1 << 30).all()
        assert (whole.output_counts[untouched] == 5).all()


@pytest.mark.usefixtures("forms")
def test_only_tokens_since_the_last_time_are_counted() -> None:
    counts, tables = full(), make_tables()
    admit(tables, 1, [3, 4], [9])
    for token in (9, 8, 9):
        count_tokens(counts, tables, ints([1]))
        append(tables, 1, [token])
    count_tokens(counts, tables, ints([1]))
    count_tokens(counts, tables, ints([1]))  # nothing is new
    assert tokens_of(counts, 1) == [3, 4]
    assert output_of(counts, 1) == {9: 3, 8: 1}
    append(tables, 1, [7] * 1500)  # while it had no row with penalties
    count_tokens(counts, tables, ints([1]))
    assert output_of(counts, 1) == {9: 3, 8: 1, 7: 1500}
    admit(tables, 1, [3, 9], [9])  # another one
    count_tokens(counts, tables, ints([1]))
    assert tokens_of(counts, 1) == [3, 9]
    assert output_of(counts, 1) == {9: 1}


def test_slots_beyond_two_to_the_31() -> None:
    vocab, last = 2**22, 2**9  # the last slot starts at element 2^31
    output_counts = vast_zeros(4 * (last + 1) * vocab).view(torch.int32).view(last + 1, vocab)
    mask = vast_zeros((last + 1) * vocab // 8).view(torch.int32).view(last + 1, -1)
    tables = make_tables(last + 1)
    admit(tables, last, [0, 33, vocab - 1], [vocab - 1])
    tables.num_counted_tokens[last] = 1  # clearing so many takes the interpreter long
    count_tokens(TokenCounts(mask, output_counts), tables, ints([last]))
    assert output_counts[last, -1] == 1
    assert mask[last, [0, 1, -1]].tolist() == [0, 2, -(2**31)]


def test_no_rows() -> None:
    counts = full()
    count_tokens(counts, make_tables(), ints([]))
    assert (counts.output_counts == 5).all()


def test_wrong_arguments_are_named() -> None:
    counts, tables, slots = full(), make_tables(), ints([0, 1])
    apart = torch.zeros(4, 70, dtype=torch.int32, device=DEVICE)[:, ::2]
    for name, table, message in (
        ("output_counts", slots, "must have shape"),
        ("output_counts", counts.output_counts.long(), r"must be torch\.int32"),
        ("prompt_mask", counts.prompt_mask[:, :3], r"must have shape \[4, 35\]"),
        ("prompt_mask", counts.prompt_mask.to("meta"), "must be on"),
        ("prompt_mask", apart, "must be contiguous"),
    ):
        with pytest.raises(ValueError, match=f"{name}: {message}"):
            count_tokens(counts._replace(**{name: table}), tables, slots)
    with pytest.raises(ValueError, match=r"output_counts: must have shape \[4, any\]"):
        count_tokens(full(3), tables, slots)
    for wrong, message in (
        (slots.long(), r"slots: must be torch\.int32"),
        (slots[None], "slots: must have shape"),
        (ints([0, 9, 1, 9])[::2], "slots: must be contiguous"),
        (slots.to("meta"), "slots: must be on"),
    ):
        with pytest.raises(ValueError, match=message):
            count_tokens(counts, tables, wrong)
