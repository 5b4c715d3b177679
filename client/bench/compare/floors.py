"""Upper bounds on throughput of a workload, given a machine's measured ceilings (a roofline).

All streams run in lockstep: their prompts are prefilled at once, then each step decodes one token
per stream. Matrix products and attention run in sequence, each bound by its bytes or by its
operations, whichever takes longer. Everything else is free, shared prompt prefixes are computed
once, and the KV cache is bf16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from client.bench.compare.ceilings import Ceilings
from client.bench.load.workload import Workload


@dataclass(frozen=True)
class Shape:
    """The properties of a decoder-only model that determine its speed.

    Attributes:
        layer_parameters: in the matrices of all layers; of a mixture of experts those that one
            token goes through, although a step of several tokens reads more.
        head_parameters: in the output matrix.
        kv_bytes: KV bytes per token, over all layers, in bf16.
        attention_flops: operations per query and key, over all layers.
    """

    layer_parameters: int
    head_parameters: int
    kv_bytes: int
    attention_flops: int

    @classmethod
    def of(cls, checkpoint: Path) -> Shape:
        """Read the shape from a checkpoint's `config.json`."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        mlp = 3 * hidden * config["intermediate_size"]
        if (num_experts := config.get("num_experts")) is not None:
            experts = config["num_experts_per_tok"] * config["moe_intermediate_size"]
            mlp = 3 * hidden * experts + hidden * num_experts
        layer = 2 * hidden * head_dim * (heads + kv_heads) + mlp
        return cls(
            layer_parameters=layers * layer,
            head_parameters=hidden * config["vocab_size"],
            kv_bytes=2 * 2 * layers * kv_heads * head_dim,
            attention_flops=4 * layers * heads * head_dim,
        )


@dataclass(frozen=True)
class Floor:
    """Output tokens per second with weights and products in bf16, and in int8."""

    bf16: float
    int8: float


def floor(shape: Shape, workload: Workload, ceilings: Ceilings) -> Floor | None:
    """Return the upper bounds for `workload`; None unless streams of equal requests are sent."""
    constant = workload.prompt.is_constant and workload.output.is_constant
    if workload.concurrency is None or not constant or workload.turns > 1 or workload.n > 1:
        return None
    tokens = workload.sessions * workload.output.low
    return Floor(
        bf16=tokens / _seconds(shape, workload, ceilings, ceilings.bf16, 2),
        int8=tokens / _seconds(shape, workload, ceilings, ceilings.int8, 1),
    )


def _seconds(
    shape: Shape, workload: Workload, ceilings: Ceilings, rate: float, weight_bytes: int
) -> float:
    weights = weight_bytes * (shape.layer_parameters + shape.head_parameters)

    def products(rows: int, head_rows: int) -> float:
        flops = 2 * (shape.layer_parameters * rows + shape.head_parameters * head_rows)
        return max(weights / ceilings.read, flops / rate)

    def attention(read: int, pairs: int) -> float:
        flops = shape.attention_flops * pairs
        return max(shape.kv_bytes * read / ceilings.read, flops / ceilings.bf16)

    seconds = 0.0
    assert workload.concurrency is not None
    shared, left = workload.shared, workload.sessions
    prompt = workload.prompt.low
    own = prompt - shared
    new_shared = shared  # computed once, in the first turn
    while left > 0:
        batch = min(workload.concurrency, left)
        left -= batch
        rows = batch * own + new_shared
        pairs = batch * (own * shared + own * (own + 1) // 2) + new_shared * (new_shared + 1) // 2
        seconds += products(rows, batch) + attention(batch * prompt, pairs)
        new_shared = 0
        for step in range(1, workload.output.low):  # prefill gives the first token
            context = batch * (prompt + step)
            seconds += products(batch, batch) + attention(context, context)
    return seconds
