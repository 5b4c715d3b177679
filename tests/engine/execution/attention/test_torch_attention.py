"""The CPU backend against a naive oracle: every query on its own, in float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.execution.attention.backend import attention_backend
from engine.execution.attention.cpu_attention import CpuAttention
from engine.execution.attention.torch_attention import TorchAttention
from engine.layers.attention import AttentionInputs, LayerCache
from kernels import cpu
from tests.factories.batches import BatchRow, build_batch

CPU = torch.device("cpu")


Backend = type[TorchAttention]


@pytest.fixture(params=[TorchAttention, CpuAttention], ids=["torch", "cpu"], scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Torch's kernels, and ours in C++ where these are built: every test holds for both."""
    if request.param is CpuAttention and cpu.operations(torch.zeros(())) is None:
        pytest.skip("there are no CPU kernels: python -m kernels.cpu builds them")
    chosen: Backend = request.param
    return chosen


@dataclass(frozen=True)
class Case:
    """Sequences as (cached tokens, new tokens), and the geometry they are run in."""

    sequences: tuple[tuple[int, int], ...]
    block_size: int
    kv_heads: int
    group: int
    head_dim: int
    window: int | None
    shuffled: bool
    seed: int = 0
    soft_cap: float | None = None
    has_sinks: bool = False


cases = st.builds(
    Case,
    sequences=st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30) | st.just(1)), min_size=1, max_size=6
    ).map(tuple),
    block_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    head_dim=st.sampled_from([2, 8, 12, 64]),
    window=st.none() | st.integers(1, 50),
    shuffled=st.booleans(),
    seed=st.integers(0, 2**16),
    soft_cap=st.none() | st.floats(0.1, 100.0),
    has_sinks=st.booleans(),
)


def _oracle(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, case: Case, sinks: Tensor | None
) -> Tensor:
    """Attention of the last tokens [n, H, D] of a sequence over its [S, Hkv, D]."""
    count, heads, _ = query.shape
    out = torch.empty(query.shape, dtype=torch.float64)
    for i in range(count):
        position = len(keys) - count + i
        low = 0 if case.window is None else max(0, position - case.window + 1)
        for head in range(heads):
            kv_head = head // (heads // keys.shape[1])
            seen = slice(low, position + 1)
            scores = keys[seen, kv_head].double() @ query[i, head].double() * scale
            if case.soft_cap is not None:
                scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head, None].double()))
            weights = scores.softmax(0)[: position + 1 - low]
            out[i, head] = weights @ values[seen, kv_head].double()
    return out


def _check(
    backend: Backend, case: Case, dtype: torch.dtype = torch.float32, tolerance: float = 1e-5
) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    lengths = [cached + new for cached, new in case.sequences]
    needed = [-(-length // case.block_size) for length in lengths]
    pool = torch.arange(1, sum(needed) + 4)
    if case.shuffled:
        pool = pool[torch.randperm(len(pool), generator=generator)]
    tables = [ids.tolist() for ids in pool[: sum(needed)].split(needed)]

    # Whatever belongs to no sequence is NaN: reading it would show.
    shape = (len(pool) + 1, case.block_size, case.kv_heads, case.head_dim)
    cache = LayerCache(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    contents = []
    for length, table in zip(lengths, tables, strict=True):
        slots = [
            table[p // case.block_size] * case.block_size + p % case.block_size
            for p in range(length)
        ]
        pair = [
            torch.randn(length, case.kv_heads, case.head_dim, generator=generator).to(dtype)
            for _ in range(2)
        ]
        cache.key.flatten(0, 1)[slots], cache.value.flatten(0, 1)[slots] = pair
        contents.append(pair)

    rows = [
        BatchRow([0] * new, cached, table)
        for (cached, new), table in zip(case.sequences, tables, strict=True)
    ]
    batch = build_batch(rows, block_size=case.block_size)
    query = torch.randn(
        len(batch.token_ids), case.kv_heads * case.group, case.head_dim, generator=generator
    ).to(dtype)
    scale = case.head_dim**-0.5
    sinks = torch.randn(query.shape[1], generator=generator) * 5 if case.has_sinks else None
    step = backend(case.block_size).plan(batch)
    for _ in range(2):  # the second layer reuses what the first one found
        inputs = AttentionInputs(query, cache, scale, case.window, case.soft_cap, sinks)
        out = step.attend(inputs)
    assert out.dtype == dtype
    assert out.shape == query.shape
    starts = batch.query_start_loc.tolist()
    for i, (keys, values) in enumerate(contents):
        expected = _oracle(query[starts[i] : starts[i + 1]], keys, values, scale, case, sinks)
        got = out[starts[i] : starts[i + 1]].double()
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@given(case=cases)
@settings(max_examples=60, deadline=None)
def test_any_mixed_step_matches_the_oracle(backend: Backend, case: Case) -> None:
    _check(backend, case)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_a_long_prefill_is_computed_in_tiles(backend: Backend, window: int | None) -> None:
    for cached in (0, 37):
        _check(backend, Case(((cached, 520),), 16, 1, 2, 8, window, shuffled=True))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
@pytest.mark.parametrize("window", [None, 5])
def test_half_precision(
    backend: Backend, dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    case = Case(((0, 9), (12, 1), (17, 6)), 4, 2, 3, 16, window, shuffled=True)
    _check(backend, case, dtype, tolerance)
    _check(backend, replace(case, soft_cap=1.5), dtype, tolerance)
    _check(backend, replace(case, has_sinks=True), dtype, tolerance)


def test_consecutive_blocks_are_read_in_place(backend: Backend) -> None:
    """Layers change the cache after the plan is made: the plan must hold places, not data."""
    batch = build_batch([BatchRow([0], 7, [2, 3])], block_size=4)
    step = backend(4).plan(batch)
    cache = LayerCache(torch.zeros(5, 4, 1, 2), torch.zeros(5, 4, 1, 2))
    query = torch.ones(1, 1, 2)
    step.attend(AttentionInputs(query, cache, scale=1.0))
    cache.value[2:4] = 3.0
    out = step.attend(AttentionInputs(query, cache, scale=1.0))
    torch.testing.assert_close(out, torch.full((1, 1, 2), 3.0))


def test_float32_is_left_to_torch() -> None:
    fast = CpuAttention if cpu.operations(torch.zeros(())) is not None else TorchAttention
    for dtype, expected in ((torch.float32, TorchAttention), (torch.bfloat16, fast)):
        assert type(attention_backend(CPU, dtype=dtype, block_size=16)) is expected
