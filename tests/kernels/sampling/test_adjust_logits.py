import math

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.sampling import adjust_logits as module
from kernels.sampling.adjust_logits import LogitBias, Penalties, adjust_logits, reference
from kernels.sampling.token_counts import TokenCounts
from tests.kernels.support import DEVICE, padded, randn
from tests.kernels.vast_memory import vast_zeros

LARGEST = torch.finfo(torch.float32).max

# NumPy warns where the interpreter computes infinity or NaN as intended.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)

Row = tuple[dict[int, float], dict[str, float]]

# Logit biases by token, then the penalties.
ROWS: list[Row] = [
    ({}, {}),
    ({3: 1.5, 40: -2.0, 99: -math.inf}, {}),
    ({}, {"repetition": 1.3}),
    ({}, {"repetition": 0.7}),
    ({}, {"presence": 0.6}),
    ({}, {"frequency": -0.3}),
    ({0: 0.1, 5: 0.7}, {"repetition": 1.1, "presence": -1.7, "frequency": 0.9}),
    (dict.fromkeys(range(0, 3000, 2), -math.inf), {"presence": 0.2}),
    ({7: 1e39, 8: -1e39}, {"repetition": 1e-38}),
    ({5: math.inf, 6: math.nan}, {"frequency": 2.0}),
    ({}, {"repetition": 3e38}),
]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bias_of(rows: list[list[tuple[int, float]]]) -> LogitBias:
    entries = [entry for row in rows for entry in row]
    ends = [sum(map(len, rows[:i])) for i in range(len(rows) + 1)]
    values = torch.tensor([value for _, value in entries], device=DEVICE)
    return LogitBias(ints(ends), ints([token for token, _ in entries]), values)


def penalties_of(rows: list[dict[str, float]], slots: list[int]) -> Penalties:
    columns = (("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0))
    values = ([row.get(name, neutral) for row in rows] for name, neutral in columns)
    return Penalties(ints(slots), *(torch.tensor(column, device=DEVICE) for column in values))


def counts_of(num_slots: int, vocab: int) -> TokenCounts:
    """Return tables in which a tenth of the tokens occurred, some of them often."""
    generator = torch.Generator().manual_seed(1)
    shape = (num_slots, vocab)
    output = torch.randint(0, 50, shape, generator=generator) * (
        torch.rand(shape, generator=generator) < 0.1
    )
    prompt = torch.rand(num_slots, -(-vocab // 32) * 32, generator=generator) < 0.1
    bits = prompt.view(num_slots, -1, 32) << torch.arange(32)
    return TokenCounts(bits.sum(-1).int().to(DEVICE), output.int().to(DEVICE))


def _adjusted(
    row: Tensor, bias: dict[int, float], penalties: dict[str, float], counts: TokenCounts, slot: int
) -> Tensor:
    """Return a row adjusted for one request, by simpler operations."""
    row = row.clone()
    if bias:
        row[list(bias)] += row.new_tensor(list(bias.values()))
    if penalties:
        words = counts.prompt_mask[slot].tolist()
        prompt = [t for t in range(len(row)) if words[t // 32] >> t % 32 & 1]
        output = counts.output_counts[slot].nonzero()[:, 0]
        repetition = penalties.get("repetition", 1.0)
        if repetition != 1.0:
            seen = torch.tensor(sorted({*prompt, *output.tolist()}), device=row.device)
            value, penalty = row[seen], row.new_tensor(repetition)
            row[seen] = torch.where(value > 0, value / penalty, value * penalty)
        times = counts.output_counts[slot, output]
        row[output] -= penalties.get("frequency", 0.0) * times + penalties.get("presence", 0.0)
    if bias or penalties.get("repetition", 1.0) != 1.0:
        row.nan_to_num_(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
    return row


def check_rows(rows: list[Row], vocab: int) -> None:
    """Assert that rows are adjusted bit-identically to the reference and `_adjusted`."""
    counts, slots = counts_of(len(rows) + 2, vocab), list(range(len(rows)))[::-1]
    logits = padded(randn(len(rows), vocab) * 4)
    before = logits.clone()
    bias = bias_of([list(row.items()) for row, _ in rows])
    penalties = penalties_of([row for _, row in rows], slots)
    expected = reference(logits, bias, penalties, counts)
    assert torch.equal(logits, before)
    adjust_logits(logits, bias, penalties, counts)
    assert torch.equal(logits, expected)
    for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        assert torch.equal(logits[i], _adjusted(before[i], *row, counts, slot)), i


@pytest.mark.parametrize("vocab", [3001, 5008])
def test_rows_as_requests_ask_for_them(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PROGRAMS", 2)  # several blocks per program
    check_rows(ROWS, vocab)


def test_a_row_without_a_slot_has_no_penalties() -> None:
    counts, logits = counts_of(1, 100), randn(2, 100)
    before = logits.clone()
    penalties = penalties_of([{"repetition": 2.0, "presence": 1.0, "frequency": 1.0}] * 2, [-1, 0])
    adjust_logits(logits, bias_of([[], []]), penalties, counts)
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_biases_of_one_token_add_up_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ENTRIES", 4)
    # In any other order the sums round differently.
    values = [1e8, 3.0, -1e8, 0.1, 2.0**-20, -math.inf, 5.0]
    rows = [
        [(0, 0.5), (7, 1.0), *((9, value) for value in values[:5]), (10, 1.0)],
        # Starts with the last token of the previous row.
        [(10, math.inf), (10, -1.0), *((12, value) for value in values), (12, math.inf), (13, 2.0)],
    ]
    counts, logits = counts_of(1, 20), randn(2, 20)
    before, penalties = logits.clone(), penalties_of([{}, {}], [-1, -1])
    expected = reference(logits, bias_of(rows), penalties, counts)
    adjust_logits(logits, bias_of(rows), penalties, counts)
    assert torch.equal(logits, expected)
    total = before[0, 9]
    for value in values[:5]:
        total = total + value
    assert logits[0, 9] == total
    assert logits[0, 10] == before[0, 10] + 1
    assert logits[1, [10, 12]].tolist() == [LARGEST, -math.inf]
    assert logits[1, 11] == before[1, 11]


def test_the_buffer_of_entries_may_be_longer_than_they_are() -> None:
    counts, logits = counts_of(1, 20), torch.zeros(2, 20, device=DEVICE)
    bias = bias_of([[(3, 1.0)], [(4, 2.0)], [(5, 9.0)]])
    adjust_logits(
        logits,
        bias._replace(start_loc=bias.start_loc[:3]),
        penalties_of([{}, {}], [-1, -1]),
        counts,
    )
    assert logits.nonzero().tolist() == [[0, 3], [1, 4]]


def test_a_model_that_computes_nan_is_left_to_the_draw() -> None:
    counts, logits = counts_of(1, 40), torch.full((3, 40), torch.nan, device=DEVICE)
    penalties = penalties_of([{}, {"presence": 1.0}, {"repetition": 2.0}], [0, 0, 0])
    adjust_logits(logits, bias_of([[], [], []]), penalties, counts)
    assert logits[:2].isnan().all()
    assert (logits[2] == -torch.inf).all()


def test_rows_and_slots_beyond_two_to_the_31() -> None:
    vocab, last, stride = 2**13, 2**18, 2**31 + 64  # the last slot starts at element 2^31
    memory = vast_zeros(4 * (stride + vocab)).view(torch.float32)
    logits = memory.as_strided((2, vocab), (stride, 1))
    output = vast_zeros(4 * (last + 1) * vocab).view(torch.int32).view(last + 1, vocab)
    mask = vast_zeros((last + 1) * vocab // 8).view(torch.int32).view(last + 1, -1)
    output[last, 5], mask[last, 0] = 3, 1 << 6
    logits[1, 5:7] = 1.0
    adjust_logits(
        logits,
        bias_of([[], [(7, 2.0)]]),
        penalties_of([{}, {"repetition": 2.0, "frequency": 1.0}], [-1, last]),
        TokenCounts(mask, output),
    )
    assert logits[1, 4:8].tolist() == [0.0, -2.5, 0.5, 2.0]


def test_without_triton_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, logits = counts_of(2, 100), randn(2, 100)
    bias = bias_of([[(3, 1.0)], []])
    penalties = penalties_of([{"repetition": 1.2}, {"presence": 1.0}], [1, 0])
    expected = logits.clone()
    adjust_logits(expected, bias, penalties, counts)
    monkeypatch.setattr(device, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(module, "_launch", None)
    adjust_logits(logits, bias, penalties, counts)
    assert torch.equal(logits, expected)


def test_no_rows() -> None:
    adjust_logits(randn(0, 40), bias_of([]), penalties_of([], []), counts_of(1, 40))


def test_wrong_arguments_are_named() -> None:
    logits, counts = randn(2, 40), counts_of(1, 40)
    bias, penalties = bias_of([[(3, 1.0)], [(4, 1.0)]]), penalties_of([{}, {}], [0, -1])
    for wrong, message in (
        (logits.half(), r"logits: must be torch\.float32"),
        (logits[0], "logits: must have shape"),
        (logits.t().contiguous().t(), "logits: the last dimension must be contiguous"),
        (randn(2, 41), r"output_counts: must have shape \[any, 41\]"),
    ):
        with pytest.raises(ValueError, match=message):
            adjust_logits(wrong, bias, penalties, counts)
    with pytest.raises(ValueError, match="prompt_mask: must have shape"):
        adjust_logits(logits, bias, penalties, counts._replace(prompt_mask=counts.prompt_mask[:0]))
    elsewhere = TokenCounts(*(table.to("meta") for table in counts))
    with pytest.raises(ValueError, match="output_counts: must be on"):
        adjust_logits(logits, bias, penalties, elsewhere)
    for given in (bias, penalties):
        for name, column in given._asdict().items():
            for changed, message in (
                (column.half(), "must be torch"),
                (column[:1], r"must have shape \[\d\]" if name != "token_ids" else ""),
                (column.to("meta"), "must be on"),
                (torch.stack([column, column], 1)[:, 0], "must be contiguous"),
            ):
                pair = {"bias": bias, "penalties": penalties}
                kind = "bias" if given is bias else "penalties"
                pair[kind] = given._replace(**{name: changed})
                with pytest.raises(ValueError, match=f"{name}: {message}" if message else "values"):
                    adjust_logits(logits, counts=counts, **pair)
