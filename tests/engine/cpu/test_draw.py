"""The draw in C++: which token it takes for each random number, and for odd logits."""

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.cpu.draw import draw_tokens

pytestmark = pytest.mark.usefixtures("fast")

Filters = tuple[int, float, float]  # top_k, top_p, min_p
NONE: Filters = (0, 1.0, 0.0)


def draw(
    logits: Tensor, filters: list[Filters], uniform: list[float], temperature: float = 1.0
) -> list[int]:
    top_k, top_p, min_p = zip(*filters, strict=True)
    double = torch.float64
    tokens = draw_tokens(
        logits,
        torch.full((len(logits),), temperature, dtype=double),
        torch.tensor(top_k, dtype=torch.int32),
        torch.tensor(top_p, dtype=double),
        torch.tensor(min_p, dtype=double),
        torch.tensor(uniform, dtype=double),
    )
    assert tokens.dtype == torch.int64
    return tokens.tolist()


def test_min_p_alone_never_draws_what_it_forbids() -> None:
    # The second weight is half of the first but for its rounding, alone in its part of the row.
    logits = torch.full((1, 2048), -torch.inf)
    logits[0, [0, 1500]] = torch.tensor([math.log(2.0), 0.0])
    for uniform in (0.0, 0.6, 0.7, 0.9, 0.999):
        assert draw(logits, [(0, 1.0, 0.5)], [uniform])[0] in (0, 1500)


def kept_tokens(weights: list[int], filters: Filters) -> list[int]:
    """Return the tokens that stay, found one after the other."""
    top_k, top_p, min_p = filters
    order = sorted(range(len(weights)), key=lambda token: -weights[token])
    largest = weights[order[0]]
    for token in order:  # no decision is to hang on rounding
        assume(min_p in (0.0, 1.0) or abs(weights[token] / largest - min_p) > 1e-4)
    left = [t for t in order[: top_k or None] if weights[t] >= min_p * largest]
    kept, before, mass = [], 0, sum(weights[token] for token in left)
    for token in left:
        assume(top_p == 1.0 or abs(before / mass - top_p) > 1e-4)
        if before < top_p * mass or top_p == 1.0:
            kept.append(token)
        before += weights[token]
    return sorted(token for token in kept if weights[token])


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 700) | st.integers(3000, 5000),
    largest=st.integers(1, 2000),
    power=st.sampled_from([0.2, 1.0, 3.0, 20.0]),
    filters=st.tuples(
        st.just(0) | st.integers(1, 9) | st.integers(1, 6000),
        st.just(1.0) | st.sampled_from([0.1, 0.5, 0.9]) | st.floats(1e-3, 1.0),
        st.just(0.0) | st.just(1.0) | st.floats(0.0, 1.0),
    ),
)
def test_each_token_has_its_share_of_the_numbers(
    seed: int, size: int, largest: int, power: float, filters: Filters
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Small integers: many are equal, and some tokens are impossible.
    weights = (largest * torch.rand(size, generator=generator) ** power).floor().int()
    weights[seed % size] += 1  # some token is possible
    kept = kept_tokens(weights.tolist(), filters)
    ends = list(accumulate(weights[kept].tolist()))
    # The middle of the share of some, the first and the last among them.
    some = sorted({0, len(kept) - 1, *range(0, len(kept), 1 + len(kept) // 20)})
    uniform = [(ends[i] - int(weights[kept[i]]) / 2) / ends[-1] for i in some]
    logits = weights.double().log().float().repeat(len(some), 1)
    assert draw(logits, [filters] * len(some), uniform) == [kept[i] for i in some]


@given(
    st.lists(st.lists(st.floats(width=32), min_size=37, max_size=37), min_size=1, max_size=5),
    st.integers(1, 37),
)
def test_temperature_zero_takes_the_first_of_the_largest(
    rows: list[list[float]], size: int
) -> None:
    x = torch.tensor(rows, dtype=torch.float32)[:, :size].contiguous()
    found = draw(x, [(3, 0.5, 0.5)] * len(x), [0.9] * len(x), temperature=0.0)
    assert found == x.argmax(dim=-1).tolist()


@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_rows_of_a_whole_vocabulary(num_rows: int) -> None:
    x = torch.randn(num_rows, 32003, generator=torch.Generator().manual_seed(num_rows))
    x[:, 100:300] = x[:, 500:700]
    columns = torch.zeros(num_rows, dtype=torch.float64)
    found = draw_tokens(x, columns, columns.int(), columns + 1, columns, columns)
    assert torch.equal(found, x.argmax(dim=-1))


@pytest.mark.parametrize("filters", [NONE, (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.3)])
@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1.0, 1e300])
def test_every_temperature_gives_a_token_of_those_allowed(
    filters: Filters, temperature: float
) -> None:
    logits = torch.full((3, 200), -torch.inf)
    logits[:, [7, 90, 150]] = torch.tensor([1.0, 3.0, 2.0])
    found = draw(logits, [filters] * 3, [0.0, 0.5, 1 - 2**-53], temperature)
    assert set(found) <= {7, 90, 150}
    if temperature < 1e-3:
        assert found == [90] * 3


@pytest.mark.parametrize("filters", [NONE, (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.3)])
def test_rows_that_say_nothing_get_the_last_token(filters: Filters) -> None:
    logits = torch.zeros(3, 100)
    logits[0, 40] = torch.nan
    logits[1] = -torch.inf
    assert draw(logits, [filters] * 3, [0.5] * 3)[:2] == [99, 99]


def test_wrong_arguments_are_named() -> None:
    logits, column = torch.zeros(2, 9), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^logits: must be torch.float32"):
        draw_tokens(logits.double(), column, column.int(), column, column, column)
    with pytest.raises(ValueError, match=r"^top_k: must be torch.int32"):
        draw_tokens(logits, column, column, column, column, column)
    with pytest.raises(ValueError, match=r"^uniform: must have shape \[2\]"):
        draw_tokens(logits, column, column.int(), column, column, column[:1])
