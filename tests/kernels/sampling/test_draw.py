"""Draws against the reference, and from logits that have no distribution."""

import math

import pytest
import torch
from torch import Tensor

from kernels.device import INTERPRETED
from kernels.sampling import draw
from kernels.sampling.draw import reference, sample_tokens
from kernels.sampling.philox import exponentials_reference
from tests.kernels.sampling.draw_cases import FILTERS, rows_of
from tests.kernels.support import DEVICE, padded, randn
from tests.kernels.vast_memory import vast_zeros

# NumPy warns where the interpreter overflows to infinity as intended.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.usefixtures("division")
@pytest.mark.parametrize("ties", [False, True], ids=["unique", "tied"])
def test_the_same_tokens_as_by_sorting(ties: bool) -> None:
    rows = rows_of(FILTERS)
    logits = padded(randn(len(FILTERS), 301) * 3)
    if ties:  # as in a bfloat16 model: hardly any logit is unique
        logits = padded((logits * 8).round() / 8)
    before = logits.clone()
    assert sample_tokens(logits, *rows).tolist() == reference(logits, *rows).tolist()
    assert torch.equal(logits, before)


def test_a_large_vocabulary() -> None:
    filters = [{}, {"temperature": 0.0}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}]
    # For the flat rows top-p keeps more tokens than are listed: the whole row is read.
    logits = randn(4, 32003) * torch.tensor([3.0, 3.0, 3.0, 1.0], device=DEVICE)[:, None]
    rows = rows_of(filters)
    assert sample_tokens(logits, *rows).tolist() == reference(logits, *rows).tolist()


@pytest.mark.parametrize("vocab", [1, 2, 16, 17])
def test_a_tiny_vocabulary(vocab: int) -> None:
    rows = rows_of([{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}])
    logits = randn(5, vocab)
    assert sample_tokens(logits, *rows).tolist() == reference(logits, *rows).tolist()


def test_nothing_is_launched_for_filters_that_no_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of([{}, {"temperature": 0.0}, {"temperature": 0.3}])
    logits = randn(3, 301) * 3
    expected = sample_tokens(logits, *rows)
    monkeypatch.setattr(draw, "shortlist_kernel", None)
    assert sample_tokens(logits, *rows, has_filters=False).tolist() == expected.tolist()


@pytest.mark.usefixtures("division")
def test_parameters_are_those_of_the_slot_of_a_row() -> None:
    rows, logits = rows_of(FILTERS), randn(len(FILTERS), 150) * 2
    together = sample_tokens(logits, *rows)
    order = torch.randperm(len(FILTERS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots = order.int()
    slots[3] = -1
    drawn = sample_tokens(logits[order], rows.tables, slots)
    expected = together[order]
    expected[3] = 0
    assert drawn.tolist() == expected.tolist()
    assert reference(logits[order], rows.tables, slots).tolist() == expected.tolist()


@pytest.mark.usefixtures("division")
def test_a_row_depends_on_no_other() -> None:
    rows, logits = rows_of(FILTERS), randn(len(FILTERS), 150) * 2
    part = torch.randperm(len(FILTERS), generator=torch.Generator().manual_seed(0))[:5].to(DEVICE)
    together = sample_tokens(logits, *rows)
    assert sample_tokens(logits[part], *rows.take(part)).tolist() == together[part].tolist()


def _plainly(logits: Tensor, row: dict[str, float], times: Tensor) -> int:
    """Return the token of one row by the documented rules, in plain Python."""
    if row.get("temperature") == 0:
        return int(logits.argmax())
    probs = torch.softmax(logits.double() / row.get("temperature", 1.0), -1).tolist()
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    ranked = ranked[: int(row.get("top_k", 0)) or None]
    ranked = [token for token in ranked if probs[token] >= row.get("min_p", 0) * max(probs)]
    total, kept, mass = sum(probs[token] for token in ranked), [], 0.0
    for token in ranked:
        if mass < row.get("top_p", 1.0) * total:
            kept.append(token)
        mass += probs[token]
    return max(kept, key=lambda token: math.log(probs[token]) - math.log(times[token]))


def test_the_reference_does_what_the_interface_says() -> None:
    for seed in range(4):
        rows = rows_of(FILTERS, seed)
        logits = randn(len(FILTERS), 150, seed=seed) * 3
        times = exponentials_reference(rows.tables.seeds, rows.positions, 150)
        expected = [_plainly(*each) for each in zip(logits, FILTERS, times, strict=True)]
        assert reference(logits, *rows).tolist() == expected


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = randn(3, 5000).clamp(max=1.0)
    logits[1, 4999] = 2.0
    rows = rows_of([{"temperature": 0.0, "top_k": 3, "top_p": 0.1}] * 3)
    assert sample_tokens(logits, *rows).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-5, 3e38])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = randn(4, 150) * 5
    logits[0, 100:] = -torch.inf
    logits[1, 3], logits[1, 4] = 3e38, -3e38
    filters = [{}, {"top_p": 0.9}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.1}]
    rows = rows_of([{"temperature": temperature, **each} for each in filters])
    drawn = sample_tokens(logits, *rows)
    assert drawn.tolist() == reference(logits, *rows).tolist()
    assert drawn[0] < 100
    if temperature <= 1e-5:
        assert drawn.tolist() == logits.argmax(-1).tolist()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution_give_a_token(value: float) -> None:
    rows = rows_of(FILTERS)
    logits = torch.full((len(FILTERS), 150), value, device=DEVICE)
    drawn = sample_tokens(logits, *rows)
    assert ((drawn >= 0) & (drawn < 150)).all()
    assert drawn.tolist() == reference(logits, *rows).tolist()


def test_nan_and_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((len(FILTERS), 150), -torch.inf, device=DEVICE)
    logits[:, ::2] = torch.nan
    logits[:, [40, 90]] = randn(len(FILTERS), 2)
    rows = rows_of(FILTERS)
    drawn = sample_tokens(logits, *rows)
    assert set(drawn.tolist()) == {40, 90}
    assert drawn.tolist() == reference(logits, *rows).tolist()


def test_an_infinite_logit_wins() -> None:
    logits = randn(len(FILTERS), 150)
    logits[:, 77] = torch.inf
    assert set(sample_tokens(logits, *rows_of(FILTERS)).tolist()) == {77}


def _chi_square(drawn: Tensor, probs: list[float]) -> float:
    counts = drawn.bincount(minlength=len(probs)).tolist()
    assert not any(count for count, p in zip(counts, probs, strict=True) if not p)
    expected = [p * len(drawn) for p in probs]
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e)


@pytest.mark.parametrize(
    ("row", "kept", "limit"),
    # One correct sampler in 10^4 exceeds the limits.
    [
        ({}, [0.3, 0.05, 0.25, 0.1, 0.2, 0.1], 25.7),
        ({"top_k": 3}, [0.3, 0, 0.25, 0, 0.2, 0], 18.4),
        ({"top_p": 0.8}, [0.3, 0, 0.25, 0.1, 0.2, 0], 21.1),
        ({"min_p": 0.3}, [0.3, 0, 0.25, 0.1, 0.2, 0.1], 23.5),
        ({"temperature": 0.5}, [0.09, 0.0025, 0.0625, 0.01, 0.04, 0.01], 25.7),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution(
    row: dict[str, float], kept: list[float], limit: float
) -> None:
    count = 20_000
    probs = torch.tensor([0.3, 0.05, 0.25, 0.1, 0.2, 0.1], device=DEVICE)
    logits = probs.log()[None].repeat(count, 1)
    rows = rows_of([row] * count)
    expected = reference(logits, *rows)
    assert _chi_square(expected, [p / sum(kept) for p in kept]) < limit
    shown = slice(0, 4 if INTERPRETED else count)
    drawn = sample_tokens(logits[shown], *rows.take(shown))
    assert drawn.tolist() == expected[shown].tolist()


def test_a_large_flat_vocabulary_is_drawn_from_evenly() -> None:
    count, vocab = 200, 2**15
    rows = rows_of([{}] * count)
    tokens = exponentials_reference(rows.tables.seeds, rows.positions, vocab).argmin(-1)
    assert _chi_square(tokens // (vocab // 16), [1 / 16] * 16) < 44.3
    logits = torch.zeros(1, vocab, device=DEVICE)
    assert int(sample_tokens(logits, *rows.take(slice(0, 1)))) == int(tokens[0])


def test_rows_that_lie_beyond_two_to_the_31() -> None:
    stride = 2**30 + 8
    memory = vast_zeros(4 * (2 * stride + 150)).view(torch.float32)
    logits = memory.as_strided((3, 150), (stride, 1))
    logits.copy_(randn(3, 150))
    rows = rows_of([{}, {"top_k": 20, "top_p": 0.9}, {"top_p": 0.5}])
    assert sample_tokens(logits, *rows).tolist() == reference(logits, *rows).tolist()


def test_no_rows() -> None:
    assert sample_tokens(randn(0, 8), *rows_of([])).shape == (0,)


def test_the_settings_of_vocabularies_keep_their_bounds() -> None:
    for vocab in (1, 100, 32_000, 128_256, 151_936, 262_144, 262_145, 2**22):
        division = draw.settings(vocab)
        assert math.ceil(vocab / division.group) <= 2**13
        assert division.chunk % (16 * division.group) == 0
        assert division.tile * division.group == 8192


def test_wrong_arguments_are_named() -> None:
    logits, rows = randn(2, 8), rows_of([{}, {}])
    for wrong, message in (
        (logits.half(), r"logits: must be torch\.float32"),
        (logits[0], "logits: must have shape"),
        (logits[:, :0], "logits: rows must have 1 to"),
        (logits.t().contiguous().t(), "logits: the last dimension must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_tokens(wrong, *rows)
    slots = rows.slots
    for changed, message in (
        (slots.long(), r"slots: must be torch\.int32"),
        (slots[:1], r"slots: must have shape \[2\]"),
        (slots.to("meta"), "slots: must be on"),
        (torch.stack([slots, slots], 1)[:, 0], "slots: must be contiguous"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_tokens(logits, rows.tables, changed)
    with pytest.raises(ValueError, match="out: must have shape"):
        sample_tokens(logits, *rows, out=torch.zeros(3, dtype=torch.int64, device=DEVICE))
