"""Minimum times of a model's work on a machine with measured ceilings (a roofline).

Matrix products and attention run in sequence, each bound by its bytes or by its operations,
whichever takes longer. Everything else is assumed to be free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.bench.kernels.shapes import Shape

Ceilings = Mapping[str, float]  # as `engine.bench.ceilings` measures them


def bound(num_bytes: float, flops: float, ceilings: Ceilings, rate: str = "bf16") -> float:
    """Return the least seconds to move so many bytes and do so many operations at once."""
    return max(num_bytes / ceilings["read"], flops / ceilings[rate])


def step_seconds(
    shape: Shape, ceilings: Ceilings, *, rows: int, sampled: int, keys: int, pairs: int
) -> float:
    """Return the floor of a step.

    Args:
        rows: tokens that go through the layers.
        sampled: those of them that go through the head.
        keys: tokens whose KV is read.
        pairs: of a query and a key that it sees.
    """
    layers, head = shape.layer_parameters, shape.head_parameters
    gemms = bound(2 * (layers + head), 2 * (layers * rows + head * sampled), ceilings)
    return gemms + bound(shape.kv_bytes_per_token * keys, shape.attention_flops * pairs, ceilings)


def decode_seconds(shape: Shape, batch: int, tokens: int, ceilings: Ceilings) -> float:
    """Return the floor of a step of `batch` sequences that have `tokens` tokens in total."""
    return step_seconds(shape, ceilings, rows=batch, sampled=batch, keys=tokens, pairs=tokens)


def prefill_seconds(shape: Shape, lengths: Sequence[int], ceilings: Ceilings) -> float:
    """Return the floor of prefilling prompts of these lengths and sampling one token each."""
    tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
    return step_seconds(
        shape, ceilings, rows=tokens, sampled=len(lengths), keys=tokens, pairs=pairs
    )
