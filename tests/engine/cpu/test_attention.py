"""What the oracle of the attention backends does not see: idle rows, ranges of keys, arguments."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.attention import attention_in_place

BLOCK = 16


def _inputs(
    lengths: list[int], queries: list[int], heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return a step whose sequences lie in shuffled blocks; whatever is no token's is NaN."""
    generator = torch.Generator().manual_seed(0)
    counts = [-(-length // BLOCK) for length in lengths]
    blocks = torch.randperm(sum(counts) + 3, generator=generator).int()
    tables = torch.full((len(lengths), max(counts) + 2), -1, dtype=torch.int32)
    caches = [torch.full((len(blocks), BLOCK, kv_heads, dim), torch.nan) for _ in range(2)]
    for row, (length, own) in enumerate(zip(lengths, blocks.split([*counts, 3])[:-1], strict=True)):
        tables[row, : len(own)] = own
        for cache in caches:
            tokens = torch.arange(length)
            cache[own[tokens // BLOCK].long(), tokens % BLOCK] = torch.randn(
                length, kv_heads, dim, generator=generator
            )
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return {
        "query": torch.randn(int(starts[-1]), heads, dim, generator=generator).to(dtype),
        "key_cache": caches[0].to(dtype),
        "value_cache": caches[1].to(dtype),
        "query_start_loc": starts,
        "seq_lens": torch.tensor(lengths).int(),
        "block_tables": tables,
    }


def _expected(given: dict[str, Tensor], row: int, window: int | None) -> Tensor:
    """Return the attention of one sequence of the step, in float64."""
    start, end = given["query_start_loc"][row : row + 2].tolist()
    length = int(given["seq_lens"][row])
    tokens = torch.arange(length)
    slots = given["block_tables"][row][tokens // BLOCK].long() * BLOCK + tokens % BLOCK
    query = given["query"][start:end].double()
    group = query.shape[1] // given["key_cache"].shape[2]
    key, value = (
        given[name].flatten(0, 1)[slots].double().repeat_interleave(group, 1)
        for name in ("key_cache", "value_cache")
    )
    scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[2] ** -0.5
    places = torch.arange(length - (end - start), length)[:, None]
    hidden = tokens > places
    if window is not None:
        hidden |= tokens <= places - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(7, 1, 64), (1, 1, 80), (8, 8, 80), (70, 1, 33)]
)
@pytest.mark.usefixtures("threads")
def test_few_long_sequences_are_divided(
    fast: Any, heads: int, kv_heads: int, dim: int, window: int | None,
    dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    given = _inputs([1337, 3], [2, 1], heads, kv_heads, dim, dtype)
    out = attention_in_place(**given, scale=dim**-0.5, sliding_window=window).double()
    for row, (start, end) in enumerate([(0, 2), (2, 3)]):
        expected = _expected(given, row, window)
        torch.testing.assert_close(out[start:end], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(14, 2, 40), (8, 8, 40), (72, 3, 40), (130, 2, 40), (14, 2, 64), (30, 10, 96), (48, 4, 96)],
)
@pytest.mark.usefixtures("threads")
def test_many_sequences_take_several_heads_at_once(
    fast: Any, heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    lengths = [1, 64, 65, 130, 200, 97, 33] * 6
    queries = [1, 1, 2, 1, 9, 1, 33] * 6  # from decodes, which take all heads, to a prefill
    given = _inputs(lengths, queries, heads, kv_heads, dim, dtype)
    out = attention_in_place(**given, scale=dim**-0.5, sliding_window=window).double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for row, (start, end) in enumerate(pairwise(given["query_start_loc"].tolist())):
        expected = _expected(given, row, window)
        torch.testing.assert_close(out[start:end], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 1, 50, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(14, 2, 64), (3, 3, 40)])
@pytest.mark.usefixtures("threads")
def test_a_token_alone_gets_the_same_bits_as_in_any_chunk(
    fast: Any, heads: int, kv_heads: int, dim: int, window: int | None, dtype: torch.dtype
) -> None:
    lengths, queries = [1337, 66, 1, 300], [1, 66, 1, 170]
    given = _inputs(lengths, queries, heads, kv_heads, dim, dtype)
    attend = partial(attention_in_place, scale=dim**-0.5, sliding_window=window, split_keys=False)
    together = attend(**given)
    for row, (start, end) in enumerate(pairwise(given["query_start_loc"].tolist())):
        for token in range(start, end):
            step = {
                **given,
                "query": given["query"][token : token + 1],
                "query_start_loc": torch.tensor([0, 1]).int(),
                "seq_lens": torch.tensor([lengths[row] - (end - 1 - token)]).int(),
                "block_tables": given["block_tables"][row : row + 1],
            }
            assert torch.equal(attend(**step)[0], together[token])


def test_idle_rows_are_passed_over(fast: Any) -> None:
    given = _inputs([20, 0, 33], [1, 1, 5], 4, 2, 16, torch.float32)
    given["block_tables"][1] = 2**30
    out = attention_in_place(**given, scale=0.25, sliding_window=None).double()
    for row, (start, end) in {0: (0, 1), 2: (2, 7)}.items():
        torch.testing.assert_close(
            out[start:end], _expected(given, row, None), rtol=1e-5, atol=1e-5
        )


def test_no_sequences(fast: Any) -> None:
    given = _inputs([5], [1], 4, 2, 16, torch.float32)
    given["seq_lens"].zero_()
    assert attention_in_place(**given, scale=1.0, sliding_window=None).shape == (1, 4, 16)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", torch.ones(1, 4, 16).int(), "query: must be"),
        ("query", torch.ones(1, 3, 16), "query: its 3 heads must be a multiple"),
        ("key_cache", torch.ones(4, 16, 2, 8), "key_cache: must have shape"),
        ("value_cache", torch.ones(4, 16, 2, 16).half(), "value_cache: must"),
        ("key_cache", torch.ones(4, 2, 16, 16).transpose(1, 2), "key_cache: must be contiguous"),
        ("seq_lens", torch.ones(1).long(), "seq_lens: must be torch.int32"),
        ("seq_lens", torch.ones(2).int(), "seq_lens: must have shape"),
        ("block_tables", torch.ones(3, 1).int().T[:, ::2], "block_tables: its rows"),
        ("seq_lens", torch.ones(1, device="meta").int(), "seq_lens: must be on cpu"),
        ("sliding_window", 0, "sliding_window: must be at least 1"),
    ],
)
def test_wrong_arguments_are_named(fast: Any, name: str, wrong: Any, message: str) -> None:
    given: dict[str, Any] = _inputs([20], [1], 4, 2, 16, torch.float32)
    given["key_cache"], given["value_cache"] = (torch.ones(4, 16, 2, 16) for _ in range(2))
    with pytest.raises(ValueError, match=message):
        attention_in_place(**{"sliding_window": None, **given, name: wrong}, scale=1.0)
