"""Minimum times of a model's work on a GPU with measured ceilings (a roofline).

Matrix products and attention run in sequence, each bound by its bytes or by its operations,
whichever takes longer. Everything else is assumed to be free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from engine.bench.shapes import Shape

Ceilings = Mapping[str, float | None]


def decode_seconds(shape: Shape, batch: int, tokens: int, ceilings: Ceilings) -> float:
    """Return the floor of a step of `batch` sequences that have `tokens` tokens in total."""
    parameters = shape.layer_parameters + shape.head_parameters
    products = _seconds(shape.step_bytes, 2 * parameters * batch, ceilings)
    return products + _seconds(
        shape.kv_bytes_per_token * tokens, shape.attention_flops * tokens, ceilings
    )


def prefill_seconds(shape: Shape, lengths: Iterable[int], ceilings: Ceilings) -> float:
    """Return the floor of prefilling prompts of these lengths and sampling one token each."""
    lengths = list(lengths)
    tokens = sum(lengths)
    flops = 2 * shape.layer_parameters * tokens + 2 * shape.head_parameters * len(lengths)
    products = _seconds(shape.step_bytes, flops, ceilings)
    causal = sum(length * (length + 1) // 2 for length in lengths)
    return products + _seconds(
        shape.kv_bytes_per_token * tokens, shape.attention_flops * causal, ceilings
    )


def offline_seconds(shape: Shape, requests: Sequence[tuple[int, int]], ceilings: Ceilings) -> float:
    """Return the floor of completing all requests, (input tokens, output tokens), at once.

    All prompts are prefilled first, then every step decodes all unfinished sequences.
    """
    seconds = prefill_seconds(shape, (length for length, _ in requests), ceilings)
    running = sorted(requests, key=lambda request: request[1])
    tokens = sum(length for length, _ in running)
    done = 1  # prefill gives every sequence its first token
    left = len(running)
    for outputs, group in groupby(running, key=lambda request: request[1]):
        for step in range(done, outputs):
            seconds += decode_seconds(shape, left, tokens + left * step, ceilings)
        ended = list(group)
        done = max(done, outputs)
        left -= len(ended)
        tokens -= sum(length for length, _ in ended)
    return seconds


def _seconds(num_bytes: int, flops: int, ceilings: Ceilings) -> float:
    copy, products = ceilings["copy_gb_s"], ceilings["bf16_tflop_s"]
    assert copy is not None
    assert products is not None
    return max(num_bytes / copy / 1e9, flops / products / 1e12)
