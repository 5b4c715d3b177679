"""DRY against a search of all repetitions, as sequences grow."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.constraints.dry import Dry, DryArgs, common_suffixes
from engine.logits_processors import ProcessorRow

TEXTS = ["a", "b", "c", "ab", "\n", "x:", ":y", "::"]
BREAKERS = [(), ("\n",), ("\n", ":"), ("::",), ("ba", "\n"), ("abc",)]


def expected(tokens: list[int], args: DryArgs) -> dict[int, float]:
    """Return what is added to the logit of each token."""
    size = len(tokens)
    start = max(0, size - args.last_n)
    texts = [TEXTS[token] for token in tokens]
    last_break = -1
    for position in range(size):
        text, before = "".join(texts[: position + 1]), len("".join(texts[:position]))
        if any(b in text[max(0, before - len(b) + 1) :] for b in args.breakers):
            last_break = position
    limit = min(size - start, size - 1 - last_break)
    if size - start <= args.allowed_length or limit < args.allowed_length:
        return {}
    longest: dict[int, int] = {}
    for position in range(start, size - 1):
        length = 0
        while (
            length < limit
            and position - length >= start
            and tokens[position - length] == tokens[size - 1 - length]
        ):
            length += 1
        follower = tokens[position + 1]
        if length >= args.allowed_length and not any(b in TEXTS[follower] for b in args.breakers):
            longest[follower] = max(length, longest.get(follower, 0))
    return {
        token: -args.multiplier * args.base ** (length - args.allowed_length)
        for token, length in longest.items()
    }


def found(dry: Dry, row: ProcessorRow, tokens: list[int]) -> dict[int, float]:
    row.token_ids = np.array(tokens, dtype=np.int32)
    (answer,) = dry.adjust([row])
    if answer is None:
        return {}
    token_ids, values = answer
    assert len({*token_ids.tolist()}) == len(token_ids)
    return dict(zip(token_ids.tolist(), values.tolist(), strict=True))


@given(
    st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=30),
    st.lists(st.integers(0, len(TEXTS) - 1) | st.none(), max_size=30),
    st.sampled_from([2, 4, 8]),
    st.builds(
        DryArgs,
        multiplier=st.sampled_from([0.8, 2.0]),
        base=st.sampled_from([1.0, 1.75]),
        allowed_length=st.integers(0, 4),
        last_n=st.sampled_from([1, 2, 5, 12, 1000]),
        breakers=st.sampled_from(BREAKERS),
    ),
)
def test_the_penalties_of_a_growing_sequence(
    prompt: list[int], output: list[int | None], kinds: int, args: DryArgs
) -> None:
    """With None the next call comes only after another token: several are new."""
    dry, row = Dry(TEXTS.__getitem__), ProcessorRow(args)
    tokens = [token % kinds for token in prompt]
    assert found(dry, row, tokens) == pytest.approx(expected(tokens, args))
    for token in output:
        tokens = [*tokens, (token or 0) % kinds]
        if token is not None:
            assert found(dry, row, tokens) == pytest.approx(expected(tokens, args))
            # Asked again for the same tokens, as after a preemption.
            assert found(dry, row, tokens) == pytest.approx(expected(tokens, args))


def test_the_parameters_are_those_of_llama_cpp() -> None:
    args = DryArgs(0.8, 1.75, 2, 1000, ("\n",))
    dry = Dry(lambda token: "\n" if token == 9 else "t")
    # "1 2 3" came before: a repetition of three tokens, one more than is allowed.
    assert found(dry, ProcessorRow(args), [1, 2, 3, 4, 5, 1, 2, 3]) == {
        4: pytest.approx(-0.8 * 1.75)
    }
    # It does not reach across the break, which leaves the two that are allowed.
    assert found(dry, ProcessorRow(args), [1, 2, 3, 4, 5, 1, 9, 2, 3]) == {4: pytest.approx(-0.8)}
    assert found(dry, ProcessorRow(args), [1, 2, 3, 4, 5, 1, 2, 9, 3]) == {}


@pytest.mark.parametrize("base", [1.0, 1.0000001, 1.75, 1e300])
def test_the_longest_repetition_overflows_nothing(base: float) -> None:
    dry, row = Dry(lambda token: "t"), ProcessorRow(DryArgs(1e308, base, 2, 2**15, ()))
    penalties = found(dry, row, [7] * 5000)
    assert [*penalties] == [7]
    assert math.isfinite(np.float32(penalties[7]))
    assert penalties[7] < -1e30


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60))
def test_common_suffixes(tokens: list[int]) -> None:
    lengths = common_suffixes(np.array(tokens, dtype=np.int32)).tolist()
    for position in range(len(tokens) - 1):
        length = 0
        while length <= position and tokens[position - length] == tokens[-1 - length]:
            length += 1
        assert lengths[position] == length


def test_texts_are_looked_at_only_as_far_as_they_matter() -> None:
    """One token over and over, the longest repetition there is; and a prompt with a short one."""
    looked_at: list[int] = []

    def text_of(token: int) -> str:
        looked_at.append(token)
        return "t"

    dry = Dry(text_of)
    args = DryArgs(1.0, 1.75, 2, 2**15, ("\n",))
    row, tokens = ProcessorRow(args), [7] * 20_000
    assert found(dry, row, tokens)
    assert len(looked_at) < 200  # a longer repetition has no larger penalty
    looked_at.clear()
    for _ in range(10):
        tokens.append(7)
        assert found(dry, row, tokens)
    assert len(looked_at) == 10
    looked_at.clear()
    prompt = [1, 2, 3, *range(10, 20_000), 1, 2, 3]
    assert [*found(dry, ProcessorRow(args), prompt)] == [10]
    assert sorted(looked_at) == [1, 2, 3, 10]
