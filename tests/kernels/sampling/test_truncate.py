"""Which tokens top-n-sigma and typical-p leave, in every form of the operation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import cpu, device
from kernels.sampling.draw import reference as draw_reference
from kernels.sampling.truncate import reference, truncate_logits
from tests.kernels.sampling.draw_cases import Rows, rows_of
from tests.kernels.support import DEVICE, padded, randn

# NumPy warns where the interpreter computes infinity or NaN as intended.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning"
)

ROWS = [
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 2.5, "temperature": 0.3},
    {"top_n_sigma": 1e-6},
    {"top_n_sigma": 1e30},
    {"typical_p": 0.2},
    {"typical_p": 0.9},
    {"typical_p": 0.95, "temperature": 2.0},
    {"typical_p": 1e-9},
    {"typical_p": 0.999, "temperature": 0.1},
    {"top_n_sigma": 1.5, "typical_p": 0.5},
    {"top_n_sigma": 0.5, "typical_p": 0.9, "temperature": 5.0},
]
NEUTRAL = [{}, {"top_k": 5}, {"temperature": 0.0, "top_n_sigma": 1.0, "typical_p": 0.1}]
FORMS = ["kernel", "torch", "cpu"]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    take_form(request.param, monkeypatch)


def take_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncate by the Triton kernel, by torch, or by the C++ kernel."""
    if name == "kernel":
        if not device.has_triton(DEVICE):
            pytest.skip("there is no GPU, and no interpreter")
        return
    monkeypatch.setattr(device, "has_triton", lambda where: False)
    if name == "torch":
        monkeypatch.setattr(cpu, "operations", lambda tensor: None)
    elif cpu.operations(torch.zeros((), device=DEVICE)) is None:
        pytest.skip("there are no CPU kernels for this tensor: python -m kernels.cpu builds them")


def truncated(logits: Tensor, rows: Rows) -> Tensor:
    out = logits.clone()
    truncate_logits(out, *rows)
    return out


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("vocab", [1, 2, 17, 301, 4097, 9001])
def test_the_same_as_by_sorting(vocab: int) -> None:
    rows = rows_of([*ROWS, *NEUTRAL])
    logits = randn(len(rows.slots), vocab, seed=vocab) * 3
    expected = reference(logits, *rows)
    assert torch.equal(truncated(logits, rows), expected)
    assert torch.equal(expected[-len(NEUTRAL) :], logits[-len(NEUTRAL) :])
    assert (expected > -torch.inf).any(-1).all()


def test_strided_rows_and_slots_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    take_form("kernel", monkeypatch)
    rows = rows_of(ROWS)
    logits = randn(len(ROWS), 301) * 2
    expected = reference(logits, *rows)
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots = order.int()
    slots[4] = -1
    found = padded(logits[order])
    truncate_logits(found, rows.tables, slots)
    expected = expected[order]
    expected[4] = logits[order[4]]
    assert torch.equal(found, expected)
    assert torch.equal(reference(logits[order], rows.tables, slots), expected)


@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("vocab", [2, 33, 1000])
def test_typical_p_keeps_what_transformers_keeps(mass: float, vocab: int) -> None:
    transformers = pytest.importorskip("transformers")
    warper = transformers.TypicalLogitsWarper(mass=mass)
    logits = (
        randn(6, vocab, seed=1) * torch.tensor([0.1, 0.5, 1, 2, 4, 8.0], device=DEVICE)[:, None]
    )
    temperature = 0.7
    rows = rows_of([{"typical_p": mass, "temperature": temperature}] * 6)
    expected = warper(None, (logits / temperature).cpu()) > -torch.inf
    assert torch.equal((reference(logits, *rows) > -torch.inf).cpu(), expected)


@pytest.mark.parametrize("sigmas", [0.3, 1.0, 2.0])
def test_top_n_sigma_against_numpy(sigmas: float) -> None:
    logits = randn(4, 777, seed=2) * 3
    logits[1, 100:] = -torch.inf  # forbidden tokens do not widen the deviation
    rows = rows_of([{"top_n_sigma": sigmas, "temperature": 3.0}] * 4)
    for row, found in zip(
        logits.cpu().numpy(), reference(logits, *rows).cpu().numpy(), strict=True
    ):
        possible = row[row > -np.inf].astype(np.float64)
        kept = row >= possible.max() - sigmas * possible.std()
        assert ((found > -np.inf) == kept).all()


@pytest.mark.usefixtures("form")
def test_ties_are_kept_together() -> None:
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[:, 40:] = -3.0
    rows = rows_of([{"typical_p": 0.01}, {"typical_p": 0.96}])
    kept = truncated(logits, rows) > -torch.inf
    assert kept.sum(-1).tolist() == [40, 100]


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_without_a_distribution(value: float) -> None:
    logits = torch.full((len(ROWS), 150), value, device=DEVICE)
    found = truncated(logits, rows_of(ROWS))
    assert not found.isnan().any()
    if value == math.inf:
        assert (found > -torch.inf).all()


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_an_infinite_logit_stays_and_nan_is_forbidden(row: dict[str, float]) -> None:
    logits = randn(1, 150)
    logits[0, 77], logits[0, 3] = torch.inf, torch.nan
    found = truncated(logits, rows_of([row]))[0]
    assert found.argmax() == 77
    assert found[3] == -torch.inf


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    vocab=st.integers(1, 5000),
    scale=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    row=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.21, 1.0, 3.7])},
        optional={
            "typical_p": st.floats(1e-3, 0.9999),
            "top_n_sigma": st.floats(1e-3, 5.0),
        },
    ),
    forbidden=st.sampled_from([0.0, 0.3, 0.98]),
)
def test_every_form_keeps_the_same(
    seed: int, vocab: int, scale: float, row: dict[str, float], forbidden: float
) -> None:
    logits = randn(1, vocab, seed=seed) * scale
    chance = torch.rand(1, vocab, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    logits[chance < forbidden] = -torch.inf
    rows = rows_of([row])
    expected = reference(logits, *rows)
    # No decision is to hang on rounding: a slightly different limit keeps the same.
    for change in (1 - 1e-5, 1 + 1e-5):
        near = {name: value * change for name, value in row.items() if name != "temperature"}
        assume(torch.equal(reference(logits, *rows_of([{**row, **near}])), expected))
    found: list[Callable[[Tensor, Rows], Tensor]] = []
    for name in FORMS:
        with pytest.MonkeyPatch.context() as patch:
            try:
                take_form(name, patch)
            except pytest.skip.Exception:
                continue
            assert torch.equal(truncated(logits, rows), expected), name
            found.append(truncated)
    assert found


PROBS = [0.3, 0.05, 0.25, 0.1, 0.2, 0.1]


@pytest.mark.parametrize(
    ("row", "kept", "limit"),
    # One correct sampler in 10^4 exceeds the limits.
    [
        ({"top_n_sigma": 1.0}, [0.3, 0, 0.25, 0, 0.2, 0], 18.4),
        ({"typical_p": 0.7}, [0.3, 0, 0.25, 0, 0.2, 0], 18.4),
        ({"typical_p": 0.4}, [0, 0, 0.25, 0, 0.2, 0], 15.1),  # without the most likely token
        ({"typical_p": 0.8, "top_k": 4}, [0.3, 0, 0.25, 0.1, 0.2, 0], 21.1),
        ({"top_n_sigma": 2.0, "top_p": 0.6}, [0.3, 0, 0.25, 0, 0.2, 0], 18.4),
    ],
    ids=str,
)
def test_tokens_follow_the_distribution_of_what_is_left(
    row: dict[str, float], kept: list[float], limit: float
) -> None:
    count = 20_000
    logits = torch.tensor(PROBS, device=DEVICE).log()[None]
    rows = rows_of([row] * count)
    left = truncated(logits, rows.take(slice(0, 1)))
    drawn = draw_reference(left.expand(count, -1), *rows)
    counts = drawn.bincount(minlength=len(kept)).tolist()
    expected = [p / sum(kept) * count for p in kept]
    assert not any(c for c, e in zip(counts, expected, strict=True) if not e)
    assert sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True) if e) < limit


def test_wrong_arguments_are_named() -> None:
    rows, logits = rows_of(ROWS[:2]), randn(2, 9)
    with pytest.raises(ValueError, match=r"^logits: must be torch.float32"):
        truncate_logits(logits.double(), *rows)
    with pytest.raises(ValueError, match=r"^slots: must have shape \[2\]"):
        truncate_logits(logits, rows.tables, rows.slots[:1])
    with pytest.raises(ValueError, match=r"^slots: must be torch.int32"):
        truncate_logits(logits, rows.tables, rows.slots.long())
