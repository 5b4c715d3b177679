from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kernels import device
from kernels.attention import split_plan
from kernels.attention.paged_decode import paged_decode_attention, reference
from kernels.attention.split_plan import SplitPlan, plan_splits
from tests.kernels.attention.attention_cases import FP8, PagedCase, dense_attention, paged_case
from tests.kernels.support import DEVICE, assert_close, each_dtype, padded, randn

LENGTHS = [0, 1, 15, 16, 17, 64, 65, 300]
# Both products with an fp8 cache are in float16, whatever the query's dtype.
FP8_TOLERANCE = 1e-3


def windowed(lengths: list[int], window: int | None, **kwargs: Any) -> PagedCase:
    """Return a case without keys outside the window."""
    first_keys = [max(0, length - (window or length)) for length in lengths]
    return paged_case(lengths, first_keys=first_keys, **kwargs)


def decode(query: Tensor, case: PagedCase, plan: SplitPlan | None = None, **kwargs: Any) -> Tensor:
    """Return the attention, by default with as many splits as possible."""
    if plan is None:
        plan = plan_splits(case.seq_lens, len(query) + 12, case.key_cache.shape[2])
    return paged_decode_attention(
        query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        case.seq_lens,
        plan,
        scale=query.shape[-1] ** -0.5,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
        **kwargs,
    )


def dense(query: Tensor, case: PagedCase, **kwargs: Any) -> Tensor:
    """Return the oracle's result for the sequences, one at a time."""
    rows = []
    for q, keys, values in zip(query, case.keys, case.values, strict=True):
        if len(keys):
            row = dense_attention(q[None], keys, values, scale=query.shape[-1] ** -0.5, **kwargs)
        else:
            row = torch.zeros_like(q[None], dtype=torch.float64)
        rows.append(row)
    return torch.cat(rows)


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, 3.0)])
def test_the_reference_is_dense_attention(
    window: int | None, soft_cap: float | None, dtype: torch.dtype
) -> None:
    case, query = windowed(LENGTHS, window, dtype=dtype), randn(len(LENGTHS), 6, 64)
    found = reference(
        query,
        case.key_cache,
        case.value_cache,
        case.block_tables,
        case.seq_lens,
        window,
        scale=0.125,
        soft_cap=soft_cap,
        key_scale=case.key_scale,
        value_scale=case.value_scale,
    )
    assert_close(found, dense(query, case, sliding_window=window, soft_cap=soft_cap))


@each_dtype
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 64, 16),
        (6, 2, 80, 32),
        (4, 1, 96, 16),
        (14, 2, 64, 64),
        (8, 1, 128, 16),
        (4, 2, 256, 32),
    ],
)
def test_heads_and_blocks(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    case = paged_case(
        LENGTHS, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype
    )
    query = randn(len(LENGTHS), heads, head_dim, dtype=dtype, seed=7) * 2
    query[0] = float("nan")  # a padding row
    out = decode(query, case)
    assert out.dtype == dtype
    assert_close(out, dense(query, case))
    assert not out[0].any()


@each_dtype
@pytest.mark.parametrize("window", [1, 20, 64, 1000])
def test_sliding_window(window: int, dtype: torch.dtype) -> None:
    case, query = windowed(LENGTHS, window, dtype=dtype), randn(8, 4, 64, dtype=dtype)
    plan = plan_splits(case.seq_lens, 40, 2, sliding_window=window)
    assert_close(decode(query, case, plan), dense(query, case, sliding_window=window))


@each_dtype
@pytest.mark.parametrize("soft_cap", [0.5, 5.0])
def test_soft_cap(soft_cap: float, dtype: torch.dtype) -> None:
    case, query = paged_case(LENGTHS, dtype=dtype), randn(8, 4, 64, dtype=dtype) * 4
    out = decode(query, case, soft_cap=soft_cap)
    assert_close(out, dense(query, case, soft_cap=soft_cap))


@each_dtype
@pytest.mark.parametrize("converts", [True, False], ids=["native", "bits"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(3, 3, 64), (7, 1, 128), (4, 2, 80)])
def test_fp8_cache(
    heads: int, kv_heads: int, head_dim: int, converts: bool, dtype: torch.dtype
) -> None:
    lengths = [0, 1, 17, 150]
    case = paged_case(lengths, kv_heads=kv_heads, head_dim=head_dim, dtype=FP8)
    query = randn(4, heads, head_dim, dtype=dtype)
    limits = device.limits(DEVICE)
    with patch.object(
        device, "limits", return_value=limits if converts else replace(limits, capability=(8, 0))
    ):
        out = decode(query, case)
    tolerance = FP8_TOLERANCE if dtype == torch.float32 else None
    assert_close(out, dense(query, case), tolerance)


@pytest.mark.parametrize("converts", [True, False], ids=["native", "bits"])
def test_every_fp8_value_is_read_exactly(converts: bool) -> None:
    """Attention to a single key returns its value."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    case = paged_case([1], kv_heads=4, dtype=FP8)
    case.value_cache[case.block_tables[0, 0], 0] = codes.view(4, 64).view(FP8)
    one = torch.ones(4, device=DEVICE)
    limits = device.limits(DEVICE)
    with patch.object(
        device, "limits", return_value=limits if converts else replace(limits, capability=(8, 0))
    ):
        out = decode(randn(1, 4, 64), replace(case, key_scale=one, value_scale=one))
    assert torch.equal(out.flatten(), codes.view(FP8).float())


@each_dtype
def test_a_sequence_of_many_splits_is_merged_in_two_rounds(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split_plan, "STEP", 16)
    lengths = [16 * 33 + 3, 0, 16 * 16, 16 * 17]
    case = paged_case(lengths, kv_heads=1, head_dim=32, dtype=dtype)
    query = randn(4, 3, 32, dtype=dtype)
    plan = plan_splits(case.seq_lens, 34 + 1 + 16 + 17, 1)
    assert plan.work_items[[0, 34, 35, 51], 4].tolist() == [34, 1, 16, 17]
    assert_close(decode(query, case, plan), dense(query, case))


def test_one_plan_serves_several_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is reused by several layers, including ones with fewer KV heads than planned."""
    monkeypatch.setattr(split_plan, "STEP", 16)
    lengths = [16 * 17, 20, 0]
    plan = plan_splits(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), 20, 3)
    assert plan.work_items[0, 4] > split_plan.FAN_IN
    for kv_heads in (2, 1):
        case = paged_case(lengths, kv_heads=kv_heads, head_dim=32)
        query = randn(3, 2 * kv_heads, 32)
        out = decode(query, case, plan)
        assert_close(out, dense(query, case))
        assert torch.equal(decode(query, case, plan), out)


def test_scores_far_apart_do_not_overflow() -> None:
    case, query = paged_case([0, 1, 200], dtype=torch.float16), randn(3, 4, 64).half() * 3000
    assert_close(decode(query, case), dense(query, case))


def test_unused_block_table_entries_are_not_read() -> None:
    case, query = paged_case([5, 90, 0], spare_columns=3), randn(3, 4, 64)
    expected = dense(query, case)
    columns = torch.arange(case.block_tables.shape[1], device=DEVICE) * 16
    case.block_tables[columns >= case.seq_lens[:, None]] = 2**30
    assert_close(decode(query, case), expected)


def test_strided_rows_and_a_given_output() -> None:
    case, query = paged_case([5, 90, 0]), randn(3, 4, 64)
    wide = padded(torch.zeros(3, 5, 64, device=DEVICE))
    out = wide[:, :4]
    tables = padded(case.block_tables)
    found = decode(padded(query), replace(case, block_tables=tables), out=out)
    assert found is out
    assert_close(out, dense(query, case))
    assert not wide[:, 4].any()


def test_blocks_beyond_two_to_the_31_elements() -> None:
    case = paged_case(
        [40, 7], kv_heads=8, head_dim=128, dtype=torch.float16, lowest_block=2**17 + 5
    )
    assert case.key_cache[0].numel() * 2**17 == 2**31
    query = randn(2, 8, 128).half()
    assert_close(decode(query, case), dense(query, case))


def test_no_sequences() -> None:
    case = paged_case([])
    assert decode(randn(0, 4, 64), case).shape == (0, 4, 64)


@each_dtype
def test_without_triton_the_result_is_the_same(dtype: torch.dtype) -> None:
    case, query = windowed([0, 1, 90], 50, dtype=dtype), randn(3, 4, 64, dtype=dtype)
    plan = plan_splits(case.seq_lens, 9, 2, sliding_window=50)
    out = torch.empty_like(query)
    with patch.object(device, "runs_triton", return_value=False):
        assert decode(query, case, plan, out=out) is out
    assert_close(out, dense(query, case, sliding_window=50))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA graphs")
def test_a_captured_step_follows_the_lengths() -> None:
    case, query = paged_case([1000, 1, 2000, 300], dtype=torch.float16), randn(4, 8, 64).half()

    def step() -> Tensor:
        return decode(query, case, plan_splits(case.seq_lens, 270, 2))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1000, 1, 2000, 300], [3, 0, 1999, 70]):
        case.seq_lens.copy_(torch.tensor(lengths))
        for _ in range(20):
            graph.replay()
        shorter = replace(
            case,
            keys=[keys[:length] for keys, length in zip(case.keys, lengths, strict=True)],
            values=[values[:length] for values, length in zip(case.values, lengths, strict=True)],
        )
        assert_close(out, dense(query, shorter))


def test_wrong_arguments_are_named() -> None:
    case, query = paged_case([5, 90]), randn(2, 4, 64)
    fp8 = paged_case([5, 90], dtype=FP8)
    plan = plan_splits(case.seq_lens, 4, 2)

    def fails(message: str, query: Tensor = query, case: PagedCase = case, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message):
            decode(query, case, **{"plan": plan, **kwargs})

    fails(r"query: must be torch\.float32", query.int())
    fails("query: must have shape", query[0])
    fails("query: the last dimension must be contiguous", randn(2, 64, 4).transpose(1, 2))
    fails("query: the head dimension must be a multiple of 16", query[..., :40].contiguous())
    fails("query: its 3 heads", query[:, :3])
    fails("query: its 34 heads", randn(2, 34, 64))
    fails(r"key_cache: must be torch\.float32", case=replace(case, key_cache=case.key_cache.half()))
    fails("key_cache: must be on", case=replace(case, key_cache=case.key_cache.to("meta")))
    fails("key_cache: must have shape", case=replace(case, key_cache=case.key_cache[..., :32]))
    fails("key_cache: must be contiguous", case=replace(case, key_cache=padded(case.key_cache)))
    small = case.key_cache[:, :8].contiguous()
    fails("key_cache: must have blocks", case=replace(case, key_cache=small, value_cache=small))
    fails("value_cache: must have shape", case=replace(case, value_cache=case.value_cache[1:]))
    fails(
        r"value_cache: must be torch\.float32",
        case=replace(case, value_cache=case.value_cache.half()),
    )
    fails(
        "value_cache: must be contiguous", case=replace(case, value_cache=padded(case.value_cache))
    )
    fails("key_scale: is required", case=replace(fp8, key_scale=None))
    fails("value_scale: is required", case=replace(fp8, value_scale=None))
    fails("key_scale: is required", case=replace(case, key_scale=fp8.key_scale))
    fails("value_scale: must have shape", case=replace(fp8, value_scale=fp8.key_scale[:1]))
    fails(r"key_scale: must be torch\.float32", case=replace(fp8, key_scale=fp8.key_scale.half()))
    tables = case.block_tables
    fails(r"block_tables: must be torch\.int32", case=replace(case, block_tables=tables.long()))
    fails("block_tables: must have shape", case=replace(case, block_tables=tables[:1]))
    fails("block_tables: the last", case=replace(case, block_tables=tables.t().contiguous().t()))
    fails("seq_lens: must have shape", case=replace(case, seq_lens=case.seq_lens[:1]))
    fails(r"seq_lens: must be torch\.int32", case=replace(case, seq_lens=case.seq_lens.long()))
    fails("plan: must be for 2 sequences", plan=plan_splits(case.seq_lens[:1], 4, 2))
    fails("plan: must be for the cache's 2 KV heads", plan=plan_splits(case.seq_lens, 4, 1))
    fails("out: must have shape", out=query[:1])
    fails("out: must be torch", out=query.half())
    fails("out: the last dimension", out=randn(2, 64, 4).transpose(1, 2))
    fails("soft_cap: must be positive", soft_cap=0.0)
    if DEVICE.type == "cpu":
        fails("block_tables: must have room for", case=replace(case, block_tables=tables[:, :5]))
