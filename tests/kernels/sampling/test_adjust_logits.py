from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.sampling import adjust_logits as module
from kernels.sampling.adjust_logits import RowMasks, adjust_logits, reference
from kernels.sampling.token_counts import TokenCounts
from kernels.step.sampling_columns import ALLOWED, BIAS, MIN_TOKENS, PENALTIES
from kernels.step.seq_slot_tables import SeqSlotTables
from tests.kernels.slot_cases import empty_tables
from tests.kernels.support import DEVICE, padded, randn
from tests.kernels.vast_memory import vast_zeros

LARGEST = torch.finfo(torch.float32).max

# NumPy warns where the interpreter computes infinity or NaN as intended.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value) encountered:RuntimeWarning"
)


@dataclass(frozen=True)
class Row:
    """What one row asks for.

    Attributes:
        bias: by token.
        penalties: by the first word of their columns.
        allowed, mask: tokens that may be drawn, by the slot and by the step.
        stops: forbidden while there are fewer than `min_tokens` output tokens; there are 3.
    """

    bias: dict[int, float] = field(default_factory=dict)
    penalties: dict[str, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    mask: Sequence[int] | None = None
    stops: Sequence[int] = ()
    min_tokens: int = 0


ROWS = [
    Row(),
    Row({3: 1.5, 40: -2.0, 99: -math.inf}),
    Row({}, {"repetition": 1.3}),
    Row({}, {"repetition": 0.7}),
    Row({}, {"presence": 0.6}),
    Row({}, {"frequency": -0.3}),
    Row({0: 0.1, 5: 0.7}, {"repetition": 1.1, "presence": -1.7, "frequency": 0.9}),
    Row(dict.fromkeys(range(0, 3000, 2), -math.inf), {"presence": 0.2}),
    Row({7: 1e39, 8: -1e39}, {"repetition": 1e-38}),
    Row({5: math.inf, 6: math.nan}, {"frequency": 2.0}),
    Row({}, {"repetition": 3e38}),
    Row(allowed=[0, 31, 32, 2999]),
    Row(mask=[7]),
    Row(mask=range(1000, 3000, 3), allowed=range(0, 3000, 2)),
    Row(stops=[5, 0, 2047, 2048, 3000], min_tokens=4),
    Row(stops=[5, 0], min_tokens=3),
    Row({31: 2.0, 9: math.inf}, {"repetition": 2.0}, range(5, 80), range(20, 3000), [31], 9),
]


def tables_of(rows: Sequence[Row], slots: Sequence[int], vocab: int) -> SeqSlotTables:
    """Return tables with `rows` in `slots`, and other sequences' numbers in the other slots."""
    num_slots = max(slots, default=0) + 3
    tables = empty_tables(num_slots, max_stop_token_ids=5, max_biases=2000, vocab_size=vocab)
    tables.buffer.random_(1, 9, generator=torch.Generator(DEVICE).manual_seed(0))
    for row, slot in zip(rows, slots, strict=True):
        features = BIAS * bool(row.bias) | PENALTIES * bool(row.penalties)
        features |= ALLOWED * (row.allowed is not None) | MIN_TOKENS * bool(row.stops)
        tables.features[slot] = features
        tables.num_biases[slot] = len(row.bias)
        tables.bias_token_ids[slot, : len(row.bias)] = ints(list(row.bias))
        tables.bias_values[slot, : len(row.bias)] = floats(list(row.bias.values()))
        tables.repetition_penalty[slot] = row.penalties.get("repetition", 1.0)
        tables.presence_penalty[slot] = row.penalties.get("presence", 0.0)
        tables.frequency_penalty[slot] = row.penalties.get("frequency", 0.0)
        if row.allowed is not None:
            tables.allowed_tokens[slot] = mask_of(row.allowed, vocab)
        stops = [*row.stops, *[-1] * (5 - len(row.stops))]
        tables.stop_token_ids[slot] = ints(stops)
        tables.min_tokens[slot] = row.min_tokens
        tables.num_tokens[slot], tables.num_prompt_tokens[slot] = 10, 7
    return tables


def masks_of(rows: Sequence[Row], vocab: int) -> RowMasks | None:
    """Return the masks of the rows that have one, the last one first."""
    given = [i for i, row in enumerate(rows) if row.mask is not None][::-1]
    if not given:
        return None
    ids = [given.index(i) if i in given else -1 for i in range(len(rows))]
    return RowMasks(ints(ids), torch.stack([mask_of(rows[i].mask or (), vocab) for i in given]))


def mask_of(tokens: Sequence[int], vocab: int) -> Tensor:
    bits = torch.zeros(-(-vocab // 32) * 32, dtype=torch.int64)
    bits[[token for token in tokens if token < vocab]] = 1
    return (bits.view(-1, 32) << torch.arange(32)).sum(-1).int().to(DEVICE)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


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


def _adjusted(logits: Tensor, row: Row, counts: TokenCounts, slot: int) -> Tensor:
    """Return a row adjusted for one request, by simpler operations."""
    logits, vocab = logits.clone(), len(logits)
    bias = {token: value for token, value in row.bias.items() if token < vocab}
    if bias:
        logits[list(bias)] += floats(list(bias.values()))
    repetition = row.penalties.get("repetition", 1.0)
    if row.penalties:
        words = counts.prompt_mask[slot].tolist()
        prompt = [t for t in range(vocab) if words[t // 32] >> t % 32 & 1]
        output = counts.output_counts[slot].nonzero()[:, 0]
        if repetition != 1.0:
            seen = torch.tensor(sorted({*prompt, *output.tolist()}), device=logits.device)
            value, penalty = logits[seen], logits.new_tensor(repetition)
            logits[seen] = torch.where(value > 0, value / penalty, value * penalty)
        times = counts.output_counts[slot, output]
        penalties = row.penalties
        logits[output] -= penalties.get("frequency", 0.0) * times + penalties.get("presence", 0.0)
    if row.bias or repetition != 1.0:
        logits.nan_to_num_(nan=-torch.inf, posinf=LARGEST, neginf=-torch.inf)
    forbidden = set(row.stops) if row.min_tokens > 3 else set()
    for kept in (row.allowed, row.mask):
        if kept is not None:
            forbidden |= set(range(vocab)) - set(kept)
    logits[[token for token in forbidden if token < vocab]] = -torch.inf
    return logits


def check_rows(rows: Sequence[Row], vocab: int) -> None:
    """Assert that rows are adjusted bit-identically to the reference and `_adjusted`."""
    slots = list(range(len(rows)))[::-1]
    tables, masks = tables_of(rows, slots, vocab), masks_of(rows, vocab)
    counts = counts_of(tables.num_slots, vocab)
    logits = padded(randn(len(rows), vocab) * 4)
    before = logits.clone()
    expected = reference(logits, tables, ints(slots), counts, masks)
    assert torch.equal(logits, before)
    adjust_logits(logits, tables, ints(slots), counts, masks)
    assert torch.equal(logits, expected)
    for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        assert torch.equal(logits[i], _adjusted(before[i], row, counts, slot)), i


@pytest.mark.parametrize("vocab", [3001, 5008])
def test_rows_as_requests_ask_for_them(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"WORDS": 32, "ENTRIES": 128, "num_warps": 4}  # several blocks of everything
    monkeypatch.setattr(module, "settings", lambda: small)
    check_rows(ROWS, vocab)


def test_a_step_without_masks() -> None:
    check_rows([row for row in ROWS[:12] if row.mask is None], 3001)


def test_a_row_without_a_slot_is_left_as_it_is() -> None:
    row = Row({3: 1.0}, {"repetition": 2.0, "presence": 1.0}, range(9), range(8), [2], 5)
    tables, counts, logits = tables_of([row], [0], 100), counts_of(3, 100), randn(2, 100)
    before = logits.clone()
    masks = masks_of([row, row], 100)
    adjust_logits(logits, tables, ints([-1, 0]), counts, masks)
    assert torch.equal(logits[0], before[0])
    assert not torch.equal(logits[1], before[1])


def test_a_model_that_computes_nan_is_left_to_the_draw() -> None:
    rows = [Row(), Row({}, {"presence": 1.0}), Row({}, {"repetition": 2.0})]
    logits = torch.full((3, 40), torch.nan, device=DEVICE)
    slots = [2, 1, 0]
    adjust_logits(logits, tables_of(rows, slots, 40), ints(slots), counts_of(5, 40))
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
    row = Row({7: 2.0}, {"repetition": 2.0, "frequency": 1.0})
    tables = empty_tables(last + 1, vocab_size=vocab)
    small = tables_of([row], [0], vocab)
    for name in ("features", "num_biases", "repetition_penalty", "frequency_penalty"):
        getattr(tables, name)[last] = getattr(small, name)[0]
    tables.bias_token_ids[last], tables.bias_values[last] = 7, 2.0
    adjust_logits(logits, tables, ints([-1, last]), TokenCounts(mask, output))
    assert logits[1, 4:8].tolist() == [0.0, -2.5, 0.5, 2.0]


def test_without_triton_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = list(range(len(ROWS)))
    tables, masks = tables_of(ROWS, slots, 3001), masks_of(ROWS, 3001)
    counts, logits = counts_of(tables.num_slots, 3001), randn(len(ROWS), 3001)
    expected = logits.clone()
    adjust_logits(expected, tables, ints(slots), counts, masks)
    monkeypatch.setattr(device, "runs_triton", lambda tensor: False)
    monkeypatch.setattr(module, "_launch", None)
    adjust_logits(logits, tables, ints(slots), counts, masks)
    assert torch.equal(logits, expected)


def test_no_rows() -> None:
    adjust_logits(randn(0, 40), tables_of([], [], 40), ints([]), counts_of(1, 40))


def test_wrong_arguments_are_named() -> None:
    logits, counts, slots = randn(2, 40), counts_of(1, 40), ints([0, -1])
    tables, masks = tables_of([Row()], [0], 40), masks_of([Row(mask=[1]), Row()], 40)
    assert masks is not None
    for wrong, message in (
        (logits.half(), r"logits: must be torch\.float32"),
        (logits[0], "logits: must have shape"),
        (logits.t().contiguous().t(), "logits: the last dimension must be contiguous"),
        (randn(2, 41), r"output_counts: must have shape \[any, 41\]"),
        (randn(2, 99), r"allowed_tokens: must have shape \[any, 4\]"),
    ):
        with pytest.raises(ValueError, match=message):
            adjust_logits(wrong, tables, slots, counts, masks)
    wrong_counts = counts._replace(prompt_mask=counts.prompt_mask[:0])
    with pytest.raises(ValueError, match="prompt_mask: must have shape"):
        adjust_logits(logits, tables, slots, wrong_counts)
    elsewhere = TokenCounts(*(table.to("meta") for table in counts))
    with pytest.raises(ValueError, match="output_counts: must be on"):
        adjust_logits(logits, tables, slots, elsewhere)
    columns = {"slots": slots, **masks._asdict()}
    for name, column in columns.items():
        for changed, message in (
            (column.long(), r"must be torch\.int32"),
            (column[:1] if name != "masks" else column[:, :1], "must have shape"),
            (column.to("meta"), "must be on"),
            (torch.stack([column, column], -1)[..., 0], "must be contiguous"),
        ):
            given = {**columns, name: changed}
            wrong_masks = RowMasks(given["mask_ids"], given["masks"])
            with pytest.raises(ValueError, match=f"{name}: {message}"):
                adjust_logits(logits, tables, given["slots"], counts, wrong_masks)
