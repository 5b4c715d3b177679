from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.attention.paged_prefill import paged_prefill_attention, reference
from kernels.attention.paged_prefill_tiles import settings
from kernels.device import HOPPER
from tests.kernels.attention.attention_cases import FP8, PagedCase, dense_attention, paged_case
from tests.kernels.support import DEVICE, TOLERANCES, assert_close, each_dtype, padded, randn

# Tokens of each chunk, and total tokens of each sequence.
CHUNKS = [1, 5, 16, 33, 70, 0, 17]
LENGTHS = [40, 5, 16, 90, 70, 20, 65]
# Both products with an fp8 cache are in float16 for 16-bit queries.
FP8_TOLERANCE = {dtype: max(tolerance, 1e-3) for dtype, tolerance in TOLERANCES.items()}


def windowed(chunks: list[int], lengths: list[int], window: int | None, **kwargs: Any) -> PagedCase:
    """Return a case without keys outside the windows of the chunks."""
    first_keys = [
        0 if window is None else max(0, length - chunk - window + 1)
        for chunk, length in zip(chunks, lengths, strict=True)
    ]
    return paged_case(lengths, first_keys=first_keys, **kwargs)


def starts_of(chunks: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(chunks)], dtype=torch.int32, device=DEVICE)


def prefill(query: Tensor, case: PagedCase, chunks: list[int], **kwargs: Any) -> Tensor:
    defaults: dict[str, Any] = {
        "query_start_loc": starts_of(chunks),
        "scale": query.shape[-1] ** -0.5,
        "key_scale": case.key_scale,
        "value_scale": case.value_scale,
    }
    return paged_prefill_attention(
        query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        seq_lens=case.seq_lens,
        **{**defaults, **kwargs},
    )


def dense(query: Tensor, case: PagedCase, chunks: list[int], **kwargs: Any) -> Tensor:
    """Return the oracle's result for the chunks, one at a time."""
    parts = query[: sum(chunks)].split(chunks)
    return torch.cat(
        [
            dense_attention(q, keys, values, scale=query.shape[-1] ** -0.5, **kwargs)
            for q, keys, values in zip(parts, case.keys, case.values, strict=True)
            if len(q)
        ]
    )


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, 3.0)])
def test_the_reference_is_dense_attention(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    case = windowed(CHUNKS, LENGTHS, window, dtype=dtype)
    query = randn(sum(CHUNKS) + 3, 6, 64)
    found = reference(
        query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        starts_of(CHUNKS),
        case.seq_lens,
        scale=0.125,
        sliding_window=window,
        soft_cap=soft_cap,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
    )
    expected = dense(query, case, CHUNKS, sliding_window=window, soft_cap=soft_cap)
    assert_close(found[: sum(CHUNKS)], expected)
    assert not found[sum(CHUNKS) :].any()


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 64, 16),
        (6, 2, 80, 32),
        (4, 1, 96, 16),
        (14, 2, 32, 64),
        (8, 1, 128, 16),
        (2, 2, 256, 32),
    ],
)
def test_heads_and_blocks(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = randn(sum(CHUNKS), heads, head_dim, dtype=dtype, seed=7) * 2
    out = prefill(query, case, CHUNKS)
    assert out.dtype == dtype
    assert_close(out, dense(query, case, CHUNKS))


@each_dtype
@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_sliding_window(window: int, dtype: torch.dtype) -> None:
    case = windowed(CHUNKS, LENGTHS, window, dtype=dtype)
    query = randn(sum(CHUNKS), 4, 64, dtype=dtype)
    out = prefill(query, case, CHUNKS, sliding_window=window)
    assert_close(out, dense(query, case, CHUNKS, sliding_window=window))


@each_dtype
@pytest.mark.parametrize("soft_cap", [0.5, 5.0])
def test_soft_cap(soft_cap: float, dtype: torch.dtype) -> None:
    case, query = paged_case(LENGTHS, dtype=dtype), randn(sum(CHUNKS), 4, 64, dtype=dtype) * 4
    out = prefill(query, case, CHUNKS, soft_cap=soft_cap)
    assert_close(out, dense(query, case, CHUNKS, soft_cap=soft_cap))


@each_dtype
@pytest.mark.parametrize("converts", [True, False], ids=["native", "bits"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 64), (7, 1, 128), (4, 2, 80)])
def test_fp8_cache(
    heads: int, kv_heads: int, head_dim: int, converts: bool, dtype: torch.dtype
) -> None:
    chunks, lengths = [1, 40, 17], [60, 40, 80]
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=FP8)
    query = randn(sum(chunks), heads, head_dim, dtype=dtype)
    limits = device.limits(DEVICE)
    limits = limits if converts else replace(limits, capability=(8, 0))
    with patch.object(device, "limits", return_value=limits):
        out = prefill(query, case, chunks)
    assert_close(out, dense(query, case, chunks), FP8_TOLERANCE[dtype])


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_tiles_of_every_gpu(head_dim: int, capability: tuple[int, int]) -> None:
    chunks, lengths = [150, 140], [300, 140]
    case = paged_case(lengths, kv_heads=1, head_dim=head_dim, dtype=torch.float16)
    query = randn(sum(chunks), 2, head_dim, dtype=torch.float16)
    limits = replace(device.limits(DEVICE), capability=capability, num_sms=2)
    if DEVICE.type == "cuda" and capability != device.limits(DEVICE).capability:
        pytest.skip("only interpreted: these tiles may not fit this GPU")
    with patch.object(device, "limits", return_value=limits):
        assert_close(prefill(query, case, chunks), dense(query, case, chunks))


def test_scores_far_apart_do_not_overflow() -> None:
    case = paged_case([30, 60], dtype=torch.float16)
    query = randn(50, 4, 64).half() * 3000
    assert_close(prefill(query, case, [30, 20]), dense(query, case, [30, 20]))


def test_padding_is_not_written() -> None:
    case, query = paged_case(LENGTHS), randn(sum(CHUNKS) + 9, 4, 64)
    out = torch.full_like(query, 7.0)
    assert prefill(query, case, CHUNKS, out=out) is out
    assert_close(out[:-9], dense(query, case, CHUNKS))
    assert (out[-9:] == 7).all()


@pytest.mark.parametrize("num_before", [1, 9, 130])
def test_tokens_before_the_first_row_are_not_written(num_before: int) -> None:
    """In a captured step, decode rows come first, and are processed by another kernel."""
    chunks, lengths = [0, 0, 6, 20, 0], [40, 9, 30, 20, 0]
    case, query = paged_case(lengths), randn(num_before + sum(chunks) + 5, 4, 64)
    out = torch.full_like(query, 7.0)
    prefill(query, case, chunks, query_start_loc=starts_of(chunks) + num_before, out=out)
    rows = slice(num_before, num_before + sum(chunks))
    assert_close(out[rows], dense(query[rows], case, chunks))
    out[rows] = 7
    assert (out == 7).all()


def test_a_row_that_has_ended_harms_no_other() -> None:
    """The host, one step ahead, schedules a token of a sequence that has already ended."""
    chunks, lengths = [6, 1, 20], [30, 0, 20]
    case, query = paged_case(lengths), randn(27, 4, 64)
    out = prefill(query, case, chunks)
    expected = dense(
        torch.cat([query[:6], query[7:]]),
        replace(case, keys=[case.keys[0], case.keys[2]], values=[case.values[0], case.values[2]]),
        [6, 20],
    )
    assert_close(torch.cat([out[:6], out[7:]]), expected)
    assert not out[6].any()


def test_unused_block_table_entries_are_not_read() -> None:
    chunks = [4, 50]
    case, query = windowed(chunks, [60, 90], 20, spare_columns=3), randn(54, 4, 64)
    expected = dense(query, case, chunks, sliding_window=20)
    columns = torch.arange(case.block_tables.shape[1], device=DEVICE) * 16
    case.block_tables[columns >= case.seq_lens[:, None]] = 2**30
    first_keys = torch.tensor([60 - 4 - 20 + 1, 90 - 50 - 20 + 1], device=DEVICE)
    case.block_tables[columns + 16 <= first_keys[:, None]] = 2**30
    assert_close(prefill(query, case, chunks, sliding_window=20), expected)


def test_strided_rows_and_a_given_output() -> None:
    case, query = paged_case(LENGTHS), randn(sum(CHUNKS), 4, 64)
    wide = padded(torch.zeros(sum(CHUNKS), 5, 64, device=DEVICE))
    tables = padded(case.block_tables)
    prefill(padded(query), replace(case, block_tables=tables), CHUNKS, out=wide[:, :4])
    assert_close(wide[:, :4], dense(query, case, CHUNKS))
    assert not wide[:, 4].any()


def test_blocks_beyond_two_to_the_31_elements() -> None:
    case = paged_case(
        [40, 7], kv_heads=8, head_dim=128, dtype=torch.float16, lowest_block=2**17 + 5
    )
    assert case.key_cache[0].numel() * 2**17 == 2**31
    query = randn(10, 8, 128).half()
    assert_close(prefill(query, case, [3, 7]), dense(query, case, [3, 7]))


def test_more_sequences_than_are_compared_at_once() -> None:
    chunks = [1 + i % 3 for i in range(150)]
    lengths = [chunk + i % 2 for i, chunk in enumerate(chunks)]
    case = paged_case(lengths, kv_heads=1, head_dim=32)
    query = randn(sum(chunks), 1, 32)
    assert_close(prefill(query, case, chunks), dense(query, case, chunks))


def test_nothing_to_do() -> None:
    assert prefill(randn(0, 4, 64), paged_case([]), []).shape == (0, 4, 64)


@each_dtype
def test_without_triton_the_result_is_the_same(dtype: torch.dtype) -> None:
    case = windowed(CHUNKS, LENGTHS, 50, dtype=dtype)
    query = randn(sum(CHUNKS), 4, 64, dtype=dtype)
    with patch.object(device, "runs_triton", return_value=False):
        out = prefill(query, case, CHUNKS, sliding_window=50)
    assert_close(out, dense(query, case, CHUNKS, sliding_window=50))


def test_wrong_arguments_are_named() -> None:
    chunks = [5, 30]
    case, query = paged_case([5, 90]), randn(35, 4, 64)
    fp8 = paged_case([5, 90], dtype=FP8)

    def fails(message: str, query: Tensor = query, case: PagedCase = case, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            prefill(query, case, chunks, **kwargs)

    fails("query: must be", query.int())
    fails("query: must have shape", query[0])
    fails("query: the last dimension must be contiguous", randn(35, 64, 4).transpose(1, 2))
    fails("query: the head dimension must be", query[..., :40].contiguous())
    fails("query: its 3 heads", query[:, :3])
    fails("key_cache: must be torch", case=replace(case, key_cache=case.key_cache.half()))
    fails("key_cache: must be on", case=replace(case, key_cache=case.key_cache.to("meta")))
    fails("key_cache: must have shape", case=replace(case, key_cache=case.key_cache[..., :32]))
    fails("key_cache: must be contiguous", case=replace(case, key_cache=padded(case.key_cache)))
    small = case.key_cache[:, :8].contiguous()
    fails("key_cache: blocks must be", case=replace(case, key_cache=small, value_cache=small))
    fails("value_cache: must have shape", case=replace(case, value_cache=case.value_cache[1:]))
    fails("value_cache: must be torch", case=replace(case, value_cache=case.value_cache.half()))
    fails("key_scale: is required with", key_scale=fp8.key_scale)
    fails("value_scale: is required with", case=fp8, value_scale=None)
    fails("key_scale: must have shape", case=fp8, key_scale=fp8.key_scale[:1])
    fails("key_scale: must be torch", case=fp8, key_scale=fp8.key_scale.half())
    tables = case.block_tables
    fails("block_tables: must be torch", case=replace(case, block_tables=tables.long()))
    fails("block_tables: must have shape", case=replace(case, block_tables=tables[:1]))
    fails("block_tables: the last", case=replace(case, block_tables=tables.t().contiguous().t()))
    fails("seq_lens: must be torch", case=replace(case, seq_lens=case.seq_lens.long()))
    fails("query_start_loc: must have shape", query_start_loc=starts_of([5]))
    fails("query_start_loc: must be torch", query_start_loc=starts_of(chunks).long())
    fails("out: must have shape", out=query[:1])
    fails("out: must be torch", out=query.half())
    fails("scale: must be positive", scale=0.0)
    fails("sliding_window: must be positive", sliding_window=0)
    fails("soft_cap: must be positive", soft_cap=-1.0)


@each_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_a_token_alone_gets_the_same_bits_as_in_any_chunk(
    window: int | None, dtype: torch.dtype
) -> None:
    case = windowed(CHUNKS, LENGTHS, window, dtype=dtype)
    query = randn(sum(CHUNKS), 6, 64, dtype=dtype, seed=3)
    options = {"sliding_window": window, "is_invariant": True}
    with patch.object(device, "limits", return_value=replace(device.HOPPER, num_sms=1)):
        together = prefill(query, case, CHUNKS, **options)
    assert_close(together, dense(query, case, CHUNKS, sliding_window=window))
    first = 0
    for row, (chunk, length) in enumerate(zip(CHUNKS, LENGTHS, strict=True)):
        for token in range(0, chunk, 7):
            alone = replace(
                case,
                block_tables=case.block_tables[row : row + 1],
                seq_lens=torch.full_like(case.seq_lens[:1], length - chunk + token + 1),
            )
            own = query[first + token : first + token + 1]
            assert torch.equal(prefill(own, alone, [1], **options)[0], together[first + token])
        first += chunk


@pytest.mark.parametrize(
    ("tokens", "sequences", "cache", "rows"),
    [
        (8192, 1, torch.bfloat16, 128),
        (2048, 1, torch.bfloat16, 128),
        (8192, 8, torch.bfloat16, 64),  # chunks of 1,024 tokens
        (8192, 8, FP8, 128),
        (64, 1, torch.bfloat16, 64),  # too few to occupy the GPU
    ],
)
def test_long_chunks_have_large_tiles(
    tokens: int, sequences: int, cache: torch.dtype, rows: int
) -> None:
    tile = settings(4 * tokens, sequences, 8, 128, torch.bfloat16, cache, HOPPER)
    assert tile["BLOCK_M"] == rows
    fixed = settings(4 * tokens, sequences, 8, 128, torch.bfloat16, cache, HOPPER, is_fixed=True)
    assert fixed["BLOCK_M"] == 64
