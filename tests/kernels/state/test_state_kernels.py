"""The Triton kernels of state layers: ragged steps against float64, cuts, and their index."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.state import sub_chunks
from kernels.state.states import StateCache
from kernels.state.sub_chunks import index_sub_chunks, most_items
from tests.kernels.state.state_cases import (
    ConvLayer,
    DeltaLayer,
    Inputs,
    Layer,
    Row,
    StateSequence,
    assert_same_state,
    build_step,
    run_step,
)
from tests.kernels.support import DEVICE, assert_close

TRITON = pytest.mark.parametrize("path", ["triton"], indirect=True)

# Rows of one token are rounded once: to bfloat16 by up to 2.3e-3 of each value's size (RMS). In
# sub-chunks queries, keys and values are rounded too, and what their products are computed from;
# in float32 sums of up to 64 logarithms of decays, of which the last digits of each are lost.
# Where a first token's query and key are almost orthogonal, the norm magnifies what rounding does:
# in float32 results of the torch form are 7e-6 off, those of the kernel 1.1e-5.
TOKEN = {torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 2.5e-3}
SUB_CHUNK = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 6e-3}
LENGTHS = (1, 63, 64, 65, 200)
COMPUTED = (0, 1, 63, 64, 70)  # tokens before: on the grid of sub-chunks and off it


def _exact(layer: DeltaLayer, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Return a sequence's results and the states before and behind each token, in float64."""
    weights: dict[str, Any] = layer.weights()
    heads, ratio = layer.num_heads, layer.num_heads // layer.num_key_heads
    qkv, taps = inputs["qkv"].double(), weights["conv_weight"].double()
    before = F.pad(qkv.t(), (layer.kernel_size - 1, 0))
    mixed = F.silu(F.conv1d(before, taps[:, None], groups=layer.channels).t())
    keys = layer.num_key_heads * layer.key_dim
    query, key, value = mixed.split((keys, keys, heads * layer.value_dim), 1)
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(ratio, 1)
        for x in (each.unflatten(1, (-1, layer.key_dim)) for each in (query, key))
    )
    steps = F.softplus(inputs["decay_inputs"].double() + weights["dt_bias"].double())
    kept = (weights["decay"].double() * steps).exp()[:, :, None]
    beta = inputs["beta_logits"].double().sigmoid()[:, :, None]
    value = value.unflatten(1, (heads, -1))
    states = [qkv.new_zeros(heads, layer.key_dim, layer.value_dim)]
    results = []
    for t in range(len(qkv)):
        state = states[-1] * kept[t][:, :, None]
        known = (state * key[t][:, :, None]).sum(1)
        states.append(state + key[t][:, :, None] * (beta[t] * (value[t] - known))[:, None])
        results.append((states[-1] * query[t][:, :, None]).sum(1) * layer.key_dim**-0.5)
    found = torch.stack(results)
    found *= (found.square().mean(-1, keepdim=True) + weights["norm_eps"]).rsqrt()
    z = inputs["z"].double()
    gates = F.silu(z) if layer.gate == "silu" else z.sigmoid()
    normed = found * weights["norm_weight"].double()
    return normed.flatten(1) * gates, torch.stack(states)


def _started(
    layer: Layer, cache: StateCache, computed: int, seed: int, block: int, total: int
) -> StateSequence:
    """Return a sequence whose first tokens the reference has computed."""
    sequence = StateSequence(layer.inputs(total, seed))
    if computed:
        step, inputs = build_step(layer, [Row(sequence, computed, writes=block)])
        layer.reference(inputs, cache, step)
        sequence.computed, sequence.block = computed, block
    return sequence


def _check_ragged(layer: DeltaLayer, lengths: tuple[int, ...], computed: tuple[int, ...]) -> None:
    """Compare rows, their states and saves with float64; half of the rows write what they read."""
    cache = layer.cache(60)
    rows: list[Row] = []
    for i, (n, before) in enumerate(zip(lengths, computed, strict=True)):
        sequence = _started(layer, cache, before, i + 1, 1 + i, before + n)
        saves = [(before + n, 20 + i), (before, 59)]  # that behind is of another step
        saves += [(before + (n + 1) // 2, 30 + i), (before + n // 3, 40 + i)] if n > 4 else []
        writes = sequence.block if i % 2 and before else 10 + i
        rows.append(Row(sequence, n, writes, saves))
    run_step(layer, cache, [rows[0], Row(None, 3), *rows[1:], Row(None, 0)], padding=9, num_saves=5)
    assert cache.state is not None
    for row in rows:
        assert row.sequence is not None
        tolerance = (TOKEN if row.num_tokens == 1 else SUB_CHUNK)[layer.dtype]
        before = row.sequence.computed - row.num_tokens
        expected, states = _exact(layer, row.sequence.inputs)
        assert_close(row.sequence.output(), expected[before:], tolerance)
        for position, block in [(row.sequence.computed, row.writes), *row.saves]:
            if position > before:
                assert_close(cache.state[block], states[position], tolerance)
                slots = torch.arange(max(position - layer.ring_size, 0), position, device=DEVICE)
                ring = cache.ring[block, slots % layer.ring_size]
                assert torch.equal(ring, row.sequence.inputs["qkv"][slots])
    assert cache.state[59].isnan().all()
    assert not cache.state[0].any()
    assert not cache.ring[0].any()


@TRITON
@pytest.mark.parametrize("dtype", list(SUB_CHUNK), ids=str)
def test_delta_rule_ragged_step_matches_float64(dtype: torch.dtype) -> None:
    layer = DeltaLayer(num_key_heads=1, num_heads=2, key_dim=64, value_dim=64, dtype=dtype)
    _check_ragged(layer, (1, 70, 1, 3), (0, 63, 70, 0))


@TRITON
@pytest.mark.large
@pytest.mark.parametrize("dtype", list(SUB_CHUNK), ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        DeltaLayer(num_key_heads=2, num_heads=2, key_dim=64, value_dim=64, ring_size=7),
        DeltaLayer(num_key_heads=1, num_heads=2, key_dim=128, value_dim=128),
        DeltaLayer(num_key_heads=1, num_heads=3, key_dim=96, value_dim=192, gate="sigmoid"),
        DeltaLayer(num_key_heads=1, num_heads=4, key_dim=24, value_dim=40, kernel_size=2),
    ],
    ids=str,
)
def test_delta_rule_any_shape_matches_float64(layer: DeltaLayer, dtype: torch.dtype) -> None:
    _check_ragged(replace(layer, dtype=dtype), LENGTHS, COMPUTED)


@TRITON
@pytest.mark.large
@pytest.mark.parametrize("computed", [(0,) * 5, COMPUTED[::-1]], ids=str)
@pytest.mark.parametrize(("key", "value", "kernel"), [(64, 64, 4), (5, 7, 1)])
def test_delta_rule_any_start_matches_float64(
    key: int, value: int, kernel: int, computed: tuple[int, ...]
) -> None:
    layer = DeltaLayer(1, 1, key, value, kernel)
    _check_ragged(layer, LENGTHS, computed)


SMALL = DeltaLayer(num_key_heads=1, num_heads=1, key_dim=16, value_dim=16)


@TRITON
def test_delta_rule_cuts_at_multiples_of_64_change_no_bit() -> None:
    cache = SMALL.cache(8)
    whole, cut = (StateSequence(SMALL.inputs(150, seed=1)) for _ in range(2))
    run_step(SMALL, cache, [Row(whole, 150, writes=1, saves=[(64, 2), (70, 3)])], num_saves=2)
    run_step(SMALL, cache, [Row(cut, 64, writes=4)])
    assert_same_state(cache, 4, cache, 2)
    run_step(SMALL, cache, [Row(None, 2), Row(cut, 64, writes=4)], padding=3)
    run_step(SMALL, cache, [Row(cut, 22, writes=5)])
    assert torch.equal(cut.output(), whole.output())
    assert_same_state(cache, 5, cache, 1)


@TRITON
def test_delta_rule_invariant_cuts_change_no_bit() -> None:
    layer = replace(SMALL, is_invariant=True)
    cache = layer.cache(9)
    whole, cut, other = (StateSequence(layer.inputs(12, seed=s)) for s in (1, 1, 2))
    run_step(layer, cache, [Row(whole, 12, writes=1, saves=[(5, 2), (7, 3)])], num_saves=2)
    run_step(layer, cache, [Row(other, 3, writes=6), Row(cut, 5, writes=4)], padding=1)
    assert_same_state(cache, 4, cache, 2)
    run_step(layer, cache, [Row(cut, 1, writes=4), Row(other, 1, writes=7)])
    run_step(layer, cache, [Row(cut, 6, writes=5, saves=[(7, 8)])])
    assert torch.equal(cut.output(), whole.output())
    assert_same_state(cache, 5, cache, 1)
    assert_same_state(cache, 8, cache, 3)


@TRITON
@pytest.mark.parametrize("dtype", list(SUB_CHUNK), ids=str)
def test_short_conv_ragged_step_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    layer = ConvLayer(channels=200, ring_size=5, dtype=dtype)
    cache, expected_cache = layer.cache(60), layer.cache(60)
    rows = [Row(None, 3)]
    for i, (n, before) in enumerate(zip(LENGTHS, COMPUTED, strict=True)):
        total = before + n
        sequence = _started(layer, cache, before, i + 1, 1 + i, total)
        _started(layer, expected_cache, before, i + 1, 1 + i, total)
        writes = sequence.block if i % 2 and before else 10 + i
        rows.append(Row(sequence, n, writes, [(total, 20 + i), (before + (n + 1) // 2, 30 + i)]))
    rows[1] = replace(rows[1], saves=rows[1].saves[:1])
    step, inputs = build_step(layer, rows, padding=11, num_saves=2)
    out = layer.run(inputs, cache, step)
    expected = layer.reference(inputs, expected_cache, step)
    assert_close(out, expected, {torch.float32: 1e-6}.get(dtype, 2e-3))
    for block in range(60):
        assert torch.equal(cache.ring[block].isnan(), expected_cache.ring[block].isnan())
        assert torch.equal(cache.ring[block].nan_to_num(), expected_cache.ring[block].nan_to_num())


@TRITON
@pytest.mark.parametrize("seed", range(8))
def test_index_of_sub_chunks_matches_the_reference(seed: int) -> None:
    draw = random.Random(seed)
    num_rows = draw.choice([1, 5, 40])
    counts = [draw.choice([0, 1, 2, 63, 64, 65, 200]) for _ in range(num_rows)]
    before = [draw.choice([0, 1, 63, 64, 100]) for _ in range(num_rows)]
    idle = [draw.random() < 0.2 for _ in range(num_rows)]
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
    lengths = [0 if skip else a + b for skip, a, b in zip(idle, before, counts, strict=True)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    writes = torch.tensor([-1 if skip else 1 for skip in idle], dtype=torch.int32, device=DEVICE)
    found = index_sub_chunks(starts, seq_lens, writes, sum(counts) + draw.randrange(9))
    expected = sub_chunks.reference(starts, seq_lens, writes, len(found.items))
    assert torch.equal(found.items, expected.items)
    with_items = expected.items[:, 0].unique()[1:] if len(expected.items) else []
    for row in map(int, with_items):
        assert found.firsts[row] == expected.firsts[row]


@pytest.mark.parametrize(("tokens", "rows"), [(0, 3), (2, 1), (3, 2), (130, 1), (500, 4)])
def test_most_items_is_enough_for_rows_at_the_worst_positions(tokens: int, rows: int) -> None:
    counts = [tokens // rows] * (rows - 1)
    counts.append(tokens - sum(counts))
    needed = sum((62 + n) // 64 + 1 for n in counts if n > 1)  # from position 63 on
    assert needed <= most_items(tokens, rows) <= tokens


@TRITON
def test_steps_without_rows_of_several_tokens_need_no_sub_chunks() -> None:
    cache = SMALL.cache(4)
    sequence = StateSequence(SMALL.inputs(1, seed=1))
    step, inputs = build_step(SMALL, [Row(sequence, 1, writes=1)])
    none = index_sub_chunks(step.query_start_loc, step.seq_lens, step.writes, 3, num_decodes=1)
    assert none.items.shape == (0, 5)
    out = SMALL.run(inputs, cache, replace(step, sub_chunks=none))
    assert_close(out, _exact(SMALL, sequence.inputs)[0], 2e-6)
