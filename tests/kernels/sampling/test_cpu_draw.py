from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.sampling.cpu_draw import _FEW as FEW
from kernels.sampling.cpu_draw import TorchFilter, uniform_numbers

VOCAB = 3 * FEW


Asked = tuple[int, float, float]  # top_k, top_p, min_p


def filter_of(rows: list[Asked]) -> TorchFilter:
    top_k, top_p, min_p = zip(*rows, strict=True)
    columns = (
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor(min_p, dtype=torch.float64),
    )
    return TorchFilter(*(column[:, None] for column in columns))


def expected(probs: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """Return the tokens that stay, found one after the other."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    left = [t for t in order[: top_k or None] if probs[t] >= min_p * probs[order[0]]]
    kept, before, mass = [], 0.0, sum(probs[token] for token in left)
    for token in left:
        if before < top_p * mass or top_p >= 1:
            kept.append(token)
        before += probs[token]
    return sorted(kept)


filters = st.tuples(
    st.one_of(st.just(0), st.integers(1, 9), st.integers(FEW - 2, FEW + 2), st.integers(1, VOCAB)),
    st.one_of(st.just(1.0), st.sampled_from([0.1, 0.5, 0.9]), st.floats(1e-3, 1.0)),
    st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0)),
)
# How fast the weights fall, as small integers so that many are equal and sums are exact.
shapes = st.tuples(st.integers(1, 2000), st.sampled_from([0.2, 1.0, 3.0, 20.0]))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(shapes, filters), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_what_is_kept(rows: list[tuple[tuple[int, float], Asked]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.stack(
        [
            (largest * torch.rand(VOCAB, generator=generator, dtype=torch.float64) ** power).floor()
            for (largest, power), _ in rows
        ]
    )
    weights[:, seed] += 1  # some token is possible
    probs = weights / 2**16
    out = filter_of([asked for _, asked in rows]).apply(probs)
    for row, found, (_, asked) in zip(probs, out, rows, strict=True):
        kept = expected(row.tolist(), *asked)
        assert (found > 0).nonzero()[:, 0].tolist() == [t for t in kept if row[t] > 0]
        assert torch.equal(found[kept], row[kept])


def test_flat_and_steep_rows_at_once() -> None:
    flat = torch.full((VOCAB,), 2.0**-11, dtype=torch.float64)
    steep = torch.zeros(VOCAB, dtype=torch.float64)
    steep[[9, 700, 3]] = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    # The first three tokens are found at once, but not which of the others come next.
    both = flat.where(steep == 0, steep)
    asked: list[tuple[torch.Tensor, Asked, list[int]]] = [
        (flat, (0, 0.75, 0.0), list(range(VOCAB * 3 // 4))),
        (steep, (0, 0.6, 0.0), [3, 9]),
        (flat, (700, 1.0, 0.0), list(range(700))),
        (steep, (2, 1.0, 0.0), [3, 9]),
        (both, (FEW - 1, 1.0, 0.0), [*range(FEW - 2), 700]),
        (both, (3, 1.0, 0.0), [3, 9, 700]),
    ]
    out = filter_of([f for _, f, _ in asked]).apply(torch.stack([row for row, _, _ in asked]))
    for found, (row, _, kept) in zip(out, asked, strict=True):
        assert (found > 0).nonzero()[:, 0].tolist() == kept
        assert torch.equal(found[kept], row[kept])


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=9
    )
)
def test_uniform_numbers_are_numpys(rows: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*rows, strict=True)
    found = uniform_numbers(np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.int64))
    assert found.tolist() == [
        np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
        for seed, position in rows
    ]
