from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.sampling import token_counts
from kernels.sampling.token_counts import TokenCounts, count_output, mark_prompt, reset_slots
from tests.kernels.support import DEVICE
from tests.kernels.vast_memory import vast_zeros

VOCAB = 1100  # more than one block, and a last word with 12 bits
LONG = 2500  # prompt length, more than one block

each_index = pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)


@pytest.fixture(params=[True, False], ids=["kernel", "torch"])
def forms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        if DEVICE.type != "cpu":
            pytest.skip("serves the CPU only")
        monkeypatch.setattr(device, "runs_triton", lambda tensor: False)


def full(num_slots: int = 4, vocab: int = VOCAB) -> TokenCounts:
    """Return tables with counts left by earlier sequences."""
    counts = TokenCounts.allocate(num_slots, vocab, DEVICE)
    counts.prompt_mask.fill_(1 << 30)
    counts.output_counts.fill_(5)
    return counts


def tokens_of(counts: TokenCounts, slot: int) -> list[int]:
    words = counts.prompt_mask[slot].tolist()
    return [32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1]


def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@each_index
@pytest.mark.usefixtures("forms")
def test_marking_a_prompt_clears_the_slot(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_counts, "_MAX_PROGRAMS", 2)  # so that one program handles two blocks
    whole = full(5)
    counts = TokenCounts(*(table[1:] for table in whole))  # so that writes to slot -1 are noticed
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(VOCAB, (LONG,), generator=generator).tolist()
    prompts = [long, [0, 31, 32, 63, VOCAB - 1, 31], [5], [7, -1, VOCAB, 2**31 - 1]]
    ends = [0, LONG, LONG + 6, LONG + 7, LONG + 11]
    given = ints([token for prompt in prompts for token in prompt], dtype)
    mark_prompt(counts, ints([2, 0, -1, 3]), ints(ends), given)
    assert tokens_of(counts, 2) == sorted(set(long))
    assert tokens_of(counts, 0) == [0, 31, 32, 63, VOCAB - 1]
    assert tokens_of(counts, 3) == [7]
    assert not counts.output_counts[[0, 2, 3]].any()
    for untouched in (0, 2):
        assert (whole.prompt_mask[untouched] == 1 << 30).all()
        assert (whole.output_counts[untouched] == 5).all()


@pytest.mark.usefixtures("forms")
def test_an_empty_prompt_leaves_an_empty_slot() -> None:
    counts = full()
    mark_prompt(counts, ints([1]), ints([0, 0]), ints([]))
    assert tokens_of(counts, 1) == []
    assert len(tokens_of(counts, 0)) == counts.prompt_mask.shape[1]


@pytest.mark.usefixtures("forms")
def test_slots_are_reset() -> None:
    counts = full()
    reset_slots(counts, ints([3, -1, 1]))
    for table in counts:
        assert table.bool().any(-1).tolist() == [True, False, True, False]
        assert table[[0, 2]].all()


@each_index
@pytest.mark.usefixtures("forms")
def test_output_is_counted(dtype: torch.dtype) -> None:
    counts = TokenCounts.allocate(4, VOCAB, DEVICE)
    slots = [0, 3, -1, 0, 3, 3] + [2] * 1200
    tokens = [VOCAB - 1, 7, 7, VOCAB - 1, 7, 8] + [(3 * i) % 7 - 1 for i in range(1200)]
    tokens[1000] = VOCAB
    count_output(counts, ints(slots), ints(tokens, dtype))
    expected = torch.zeros(4, VOCAB, dtype=torch.int32)
    for slot, token in zip(slots, tokens, strict=True):
        if slot >= 0 and 0 <= token < VOCAB:
            expected[slot, token] += 1
    assert torch.equal(counts.output_counts.cpu(), expected)
    assert not counts.prompt_mask.any()


def test_slots_beyond_two_to_the_31() -> None:
    vocab, last = 2**22, 2**9  # the last slot starts at element 2^31
    output_counts = vast_zeros(4 * (last + 1) * vocab).view(torch.int32).view(last + 1, vocab)
    mask = vast_zeros((last + 1) * vocab // 8).view(torch.int32).view(last + 1, -1)
    counts = TokenCounts(mask, output_counts)
    slots = ints([last])
    count_output(counts, slots, ints([vocab - 1]))
    assert output_counts[last, -1] == 1
    mark = ints([0, 33, vocab - 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counts, "reset_slots", lambda counts, slots: None)
        mark_prompt(counts, slots, ints([0, 3]), mark)
    assert mask[last, [0, 1, -1]].tolist() == [1, 2, -(2**31)]


def test_nothing_to_do() -> None:
    counts = full()
    reset_slots(counts, ints([]))
    mark_prompt(counts, ints([]), ints([0]), ints([]))
    count_output(counts, ints([]), ints([]))
    assert (counts.output_counts == 5).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda counts, slots, ids: reset_slots(counts, slots),
        lambda counts, slots, ids: mark_prompt(counts, slots, ints([0, 1, 2]), ids),
        count_output,
    ],
    ids=["reset", "mark", "count"],
)
def test_wrong_arguments_are_named(call: Callable[[TokenCounts, Tensor, Tensor], None]) -> None:
    counts, slots, ids = full(), ints([0, 1]), ints([3, 4])
    with pytest.raises(ValueError, match="output_counts: must have shape"):
        call(counts._replace(output_counts=slots), slots, ids)
    with pytest.raises(ValueError, match=r"output_counts: must be torch\.int32"):
        call(counts._replace(output_counts=counts.output_counts.long()), slots, ids)
    with pytest.raises(ValueError, match=r"prompt_mask: must have shape \[4, 35\]"):
        call(counts._replace(prompt_mask=counts.prompt_mask[:, :3]), slots, ids)
    with pytest.raises(ValueError, match="prompt_mask: must be on"):
        call(counts._replace(prompt_mask=counts.prompt_mask.to("meta")), slots, ids)
    apart = torch.zeros(4, 70, dtype=torch.int32, device=DEVICE)[:, ::2]
    with pytest.raises(ValueError, match="prompt_mask: must be contiguous"):
        call(counts._replace(prompt_mask=apart), slots, ids)
    with pytest.raises(ValueError, match=r"slots: must be torch\.int32"):
        call(counts, slots.long(), ids)
    with pytest.raises(ValueError, match="slots: must have shape"):
        call(counts, slots[None], ids)
    with pytest.raises(ValueError, match="slots: must be contiguous"):
        call(counts, ints([0, 9, 1, 9])[::2], ids)
    with pytest.raises(ValueError, match="slots: must be on"):
        call(counts, slots.to("meta"), ids)


def test_wrong_tokens_are_named() -> None:
    counts, slots, ids, ends = full(), ints([0, 1]), ints([3, 4]), ints([0, 1, 2])
    for wrong, message in (
        (ids.short(), "token_ids: must be torch"),
        (ids[None], "token_ids: must have shape"),
        (ints([3, 9, 4, 9])[::2], "token_ids: must be contiguous"),
        (ids.to("meta"), "token_ids: must be on"),
    ):
        with pytest.raises(ValueError, match=message):
            count_output(counts, slots, wrong)
        with pytest.raises(ValueError, match=message):
            mark_prompt(counts, slots, ends, wrong)
    with pytest.raises(ValueError, match=r"token_ids: must have shape \[2\]"):
        count_output(counts, slots, ints([3]))
    for wrong, message in (
        (ends.long(), r"start_loc: must be torch\.int32"),
        (ends[:2], r"start_loc: must have shape \[3\]"),
        (ints([0, 9, 1, 9, 2, 9])[::2], "start_loc: must be contiguous"),
        (ends.to("meta"), "start_loc: must be on"),
    ):
        with pytest.raises(ValueError, match=message):
            mark_prompt(counts, slots, wrong, ids)
