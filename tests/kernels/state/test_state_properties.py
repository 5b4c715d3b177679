"""However sequences are cut into steps and put beside each other, they have the same bits."""

from dataclasses import replace

import pytest

pytest.importorskip("hypothesis")

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.state.states import StateCache
from tests.kernels.state.state_cases import (
    ConvLayer,
    DeltaLayer,
    Layer,
    Row,
    SSDLayer,
    StateSequence,
    assert_same_state,
    build_step,
    run_step,
)

LAYERS: list[Layer] = [
    ConvLayer(),
    ConvLayer(channels=100, kernel_size=4, ring_size=9, bias=False, dtype=torch.bfloat16),
    DeltaLayer(is_invariant=True),
    DeltaLayer(
        num_heads=2,
        kernel_size=3,
        value_dim=128,
        ring_size=7,
        dtype=torch.bfloat16,
        is_invariant=True,
    ),
    SSDLayer(),
    SSDLayer(num_groups=4, kernel_size=3, head_dim=64, ring_size=7, dtype=torch.bfloat16),
]
NUM_BLOCKS = 24


def _whole(layer: Layer, sequence: StateSequence, length: int) -> tuple[torch.Tensor, StateCache]:
    """Return the results of the first tokens in one step of one row, and the state in block 1."""
    cache, alone = layer.cache(2), StateSequence(sequence.inputs)
    run_step(layer, cache, [Row(alone, length, writes=1)])
    return alone.output(), cache


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_steps_of_any_rows_give_the_bits_of_a_whole_pass(layer: Layer, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3), "lengths")
    sequences = [StateSequence(layer.inputs(n, seed=i + 1)) for i, n in enumerate(lengths)]
    cache = layer.cache(NUM_BLOCKS)
    free = list(range(1, NUM_BLOCKS))
    while any(sequence.computed < len(sequence) for sequence in sequences):
        rows, saved, left = [], [], []
        for sequence in data.draw(st.permutations([*sequences, None]), "rows"):
            if sequence is None:
                rows.append(Row(None, data.draw(st.integers(0, 3), "idle tokens")))
                continue
            remaining = len(sequence) - sequence.computed
            count = min(remaining, data.draw(st.sampled_from([90, 30, 5, 2, 1, 1, 0]), "tokens"))
            if not count:
                continue
            end = sequence.computed + count
            positions = data.draw(
                st.lists(st.integers(sequence.computed + 1, end), max_size=2, unique=True), "saves"
            )
            saves = [(position, free.pop()) for position in positions]
            saved += [(sequence, position, block) for position, block in saves]
            writes = sequence.block
            if writes == 0 or data.draw(st.booleans(), "new block"):
                writes = free.pop()
                left += [sequence.block] if sequence.block else []
            rows.append(Row(sequence, count, writes, saves))
        run_step(layer, cache, rows, padding=data.draw(st.integers(0, 2), "padding"), num_saves=2)
        for sequence, position, block in saved:
            assert_same_state(cache, block, _whole(layer, sequence, position)[1], 1)
        free += left + [block for _, _, block in saved]
    for sequence in sequences:
        expected, state = _whole(layer, sequence, len(sequence))
        assert torch.equal(sequence.output(), expected)
        assert_same_state(cache, sequence.block, state, 1)
    for part in cache:
        assert part is None or not part[0].any()  # read by all


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_sequences_that_read_one_state_continue_it_apart(layer: Layer) -> None:
    sequence = StateSequence(layer.inputs(20, seed=1))
    cache = layer.cache(4)
    run_step(layer, cache, [Row(sequence, 9, writes=1)])
    fork = StateSequence(sequence.inputs, sequence.computed, sequence.block, [*sequence.outputs])
    run_step(layer, cache, [Row(sequence, 11, writes=2), Row(fork, 2, writes=3)])
    run_step(layer, cache, [Row(fork, 9, writes=3)])
    expected, state = _whole(layer, sequence, 20)
    for each in (sequence, fork):
        assert torch.equal(each.output(), expected)
        assert_same_state(cache, each.block, state, 1)
    assert_same_state(cache, 1, _whole(layer, sequence, 9)[1], 1)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_saves_at_other_positions_than_the_rows_are_ignored(layer: Layer) -> None:
    sequence = StateSequence(layer.inputs(30, seed=1))
    cache = layer.cache(7)
    run_step(layer, cache, [Row(sequence, 9, writes=1)])
    saves = [(3, 2), (9, 3), (20, 4), (21, 5), (10, 6)]
    run_step(layer, cache, [Row(sequence, 11, writes=1, saves=saves)], num_saves=6)
    for position, block in saves:
        if 9 < position <= 20:
            assert_same_state(cache, block, _whole(layer, sequence, position)[1], 1)
        else:
            assert all(part is None or part[block].isnan().all() for part in cache)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_any_number_of_threads_gives_the_same_bits(layer: Layer) -> None:
    lengths = [1, 70, 1, 7]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            sequences = [StateSequence(layer.inputs(n, seed=i)) for i, n in enumerate(lengths)]
            cache = layer.cache(6)
            rows = [
                Row(sequence, n, writes=i + 1)
                for i, (sequence, n) in enumerate(zip(sequences, lengths, strict=True))
            ]
            rows[1] = replace(rows[1], saves=[(33, 5)])
            run_step(layer, cache, rows)
            results.append((sequences, cache))
    finally:
        torch.set_num_threads(threads)
    (sequences, cache), (others, other_cache) = results
    for sequence, other in zip(sequences, others, strict=True):
        assert torch.equal(sequence.output(), other.output())
    for block in range(6):
        assert_same_state(cache, block, other_cache, block)


@pytest.mark.parametrize(
    ("layer", "size"), [(ConvLayer(), 40), (DeltaLayer(), 160), (SSDLayer(), 160)], ids=str
)
def test_no_tokens_and_no_rows(layer: Layer, size: int) -> None:
    step, inputs = build_step(layer, [], padding=0)
    assert layer.run(inputs, layer.cache(1), step).shape == (0, size)
    step, inputs = build_step(layer, [], padding=3)
    assert not layer.run(inputs, layer.cache(1), step).any()
