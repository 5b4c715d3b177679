"""Sequences for tests of state layers: their inputs, and passes over them in any steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.state.delta_rule import Gate, gated_delta_rule
from kernels.state.delta_rule import reference as delta_reference
from kernels.state.short_conv import reference as conv_reference
from kernels.state.short_conv import short_conv
from kernels.state.ssd import reference as ssd_reference
from kernels.state.ssd import ssd
from kernels.state.states import StateCache, StepStates
from tests.kernels.support import DEVICE, padded, poison, randn

Inputs = dict[str, Tensor]  # of tokens, by argument; the first dimension is that of tokens


class Layer(Protocol):
    """A state layer with fixed weights."""

    @property
    def ring_size(self) -> int: ...

    def inputs(self, num_tokens: int, seed: int) -> Inputs: ...

    def cache(self, num_blocks: int) -> StateCache: ...

    def run(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor: ...

    def reference(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor: ...


@dataclass(frozen=True)
class ConvLayer:
    channels: int = 40
    kernel_size: int = 3
    bias: bool = True
    ring_size: int = 3
    dtype: torch.dtype = torch.float32

    def inputs(self, num_tokens: int, seed: int) -> Inputs:
        return {"projected": randn(num_tokens, 3 * self.channels, dtype=self.dtype, seed=seed)}

    def cache(self, num_blocks: int) -> StateCache:
        ring = poisoned_blocks(num_blocks, self.ring_size, self.channels, dtype=self.dtype)
        return StateCache(ring, None)

    def run(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return short_conv(inputs["projected"], *self._weights(), cache, step)

    def reference(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return conv_reference(inputs["projected"], *self._weights(), cache, step)

    def _weights(self) -> tuple[Tensor, Tensor | None]:
        bias = randn(self.channels, dtype=self.dtype, seed=11) if self.bias else None
        return randn(self.channels, self.kernel_size, dtype=self.dtype, seed=10), bias


@dataclass(frozen=True)
class DeltaLayer:
    num_key_heads: int = 2
    num_heads: int = 4
    key_dim: int = 24
    value_dim: int = 40
    kernel_size: int = 4
    ring_size: int = 4
    gate: Gate = "silu"
    dtype: torch.dtype = torch.float32
    is_invariant: bool = False

    @property
    def channels(self) -> int:
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    def inputs(self, num_tokens: int, seed: int) -> Inputs:
        values = self.num_heads * self.value_dim
        sizes = {
            "qkv": self.channels,
            "z": values,
            "beta_logits": self.num_heads,
            "decay_inputs": self.num_heads,
        }
        return {
            name: randn(num_tokens, size, dtype=self.dtype, seed=4 * seed + i)
            for i, (name, size) in enumerate(sizes.items())
        }

    def cache(self, num_blocks: int) -> StateCache:
        sizes = (self.num_heads, self.key_dim, self.value_dim)
        return StateCache(
            poisoned_blocks(num_blocks, self.ring_size, self.channels, dtype=self.dtype),
            poisoned_blocks(num_blocks, *sizes, dtype=torch.float32),
        )

    def run(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return gated_delta_rule(
            **inputs, **self.weights(), cache=cache, step=step, is_invariant=self.is_invariant
        )

    def reference(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return delta_reference(**inputs, **self.weights(), cache=cache, step=step)

    def weights(self) -> dict[str, Any]:
        """Return the other arguments than those of tokens and states."""
        weight = randn(self.channels, self.kernel_size, dtype=self.dtype, seed=10)
        return {
            "conv_weight": weight,
            # From a state that is forgotten at once to one that hardly decays.
            "decay": -torch.logspace(-4, 1, self.num_heads, device=DEVICE),
            "dt_bias": randn(self.num_heads, dtype=self.dtype, seed=11),
            "norm_weight": randn(self.value_dim, dtype=self.dtype, seed=12),
            "norm_eps": 1e-6,
            "num_key_heads": self.num_key_heads,
            "gate": self.gate,
        }


@dataclass(frozen=True)
class SSDLayer:
    num_heads: int = 4
    num_groups: int = 2
    state_size: int = 24
    head_dim: int = 40
    kernel_size: int = 4
    ring_size: int = 4
    bias: bool = True
    dt_limits: tuple[float, float] = (0.0, math.inf)
    dtype: torch.dtype = torch.float32

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.num_groups * self.state_size

    def inputs(self, num_tokens: int, seed: int) -> Inputs:
        sizes = {"inputs": self.channels, "time_steps": self.num_heads}
        return {
            name: randn(num_tokens, size, dtype=self.dtype, seed=2 * seed + i)
            for i, (name, size) in enumerate(sizes.items())
        }

    def cache(self, num_blocks: int) -> StateCache:
        sizes = (self.num_heads, self.state_size, self.head_dim)
        return StateCache(
            poisoned_blocks(num_blocks, self.ring_size, self.channels, dtype=self.dtype),
            poisoned_blocks(num_blocks, *sizes, dtype=torch.float32),
        )

    def run(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return ssd(**inputs, **self.weights(), cache=cache, step=step)

    def reference(self, inputs: Inputs, cache: StateCache, step: StepStates) -> Tensor:
        return ssd_reference(**inputs, **self.weights(), cache=cache, step=step)

    def weights(self) -> dict[str, Any]:
        """Return the other arguments than those of tokens and states."""
        weight = randn(self.channels, self.kernel_size, dtype=self.dtype, seed=10)
        return {
            "conv_weight": weight,
            "conv_bias": randn(self.channels, dtype=self.dtype, seed=13) if self.bias else None,
            "decay": -torch.logspace(-4, 1, self.num_heads, device=DEVICE),
            "dt_bias": randn(self.num_heads, dtype=self.dtype, seed=11),
            "dt_limits": self.dt_limits,
            "skip": randn(self.num_heads, dtype=self.dtype, seed=12),
            "num_groups": self.num_groups,
        }


def poisoned_blocks(num_blocks: int, *sizes: int, dtype: torch.dtype) -> Tensor:
    """Return blocks that lie apart in memory: zeros in block 0, NaN in the others."""
    words = poison(
        torch.empty(num_blocks, 8 + torch.Size(sizes).numel(), dtype=dtype, device=DEVICE)
    )
    blocks = words[:, 8:].unflatten(1, sizes)
    blocks[0] = 0
    return blocks


@dataclass
class StateSequence:
    """A sequence: its inputs, how many tokens are computed, in which block that state is."""

    inputs: Inputs
    computed: int = 0
    block: int = 0
    outputs: list[Tensor] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    def output(self) -> Tensor:
        """Return the results of all tokens computed so far."""
        return torch.cat(self.outputs)


@dataclass(frozen=True)
class Row:
    """The next tokens of a sequence in a step; of None, an idle row, whose inputs are NaN.

    Attributes:
        writes: block that gets the state.
        saves: blocks that get the states after so many tokens of the sequence, too.
    """

    sequence: StateSequence | None
    num_tokens: int
    writes: int = -1
    saves: Sequence[tuple[int, int]] = ()


def run_step(
    layer: Layer, cache: StateCache, rows: Sequence[Row], *, padding: int = 0, num_saves: int = 1
) -> None:
    """Compute a step, append to the outputs of its sequences and note where their states are."""
    step, inputs = build_step(layer, rows, padding=padding, num_saves=num_saves)
    out = layer.run(inputs, cache, step)
    begin = 0
    for row in rows:
        found = out[begin : begin + row.num_tokens]
        begin += row.num_tokens
        if row.sequence is None:
            assert not found.any()
        else:
            row.sequence.outputs.append(found)
            row.sequence.computed += row.num_tokens
            row.sequence.block = row.writes
    assert not out[begin:].any()


def build_step(
    layer: Layer, rows: Sequence[Row], *, padding: int = 0, num_saves: int = 1
) -> tuple[StepStates, Inputs]:
    """Return a step's arrays and its inputs, in strided rows; of padding and idle rows NaN."""
    starts, seq_lens, reads, writes, saves = [0], [], [], [], []
    parts: list[Inputs] = []
    nothing = {name: x[:0] for name, x in layer.inputs(1, 0).items()}
    for row in (*rows, Row(None, padding)):
        sequence, n = row.sequence, row.num_tokens
        starts.append(starts[-1] + n)
        computed = 0 if sequence is None else sequence.computed
        seq_lens.append(0 if sequence is None else computed + n)
        reads.append(-1 if sequence is None else sequence.block)
        writes.append(row.writes)
        absent = [(0, -1)] * (num_saves - len(row.saves))
        saves.append([*row.saves, *absent])
        parts.append(
            {
                name: poison(x.new_empty(n, x.shape[1]))
                if sequence is None
                else sequence.inputs[name][computed : computed + n]
                for name, x in nothing.items()
            }
        )
    inputs = {name: padded(torch.cat([part[name] for part in parts])) for name in nothing}
    arrays = (starts[:-1], seq_lens[:-1], reads[:-1], writes[:-1], saves[:-1])
    tensors = [torch.tensor(array, dtype=torch.int32, device=DEVICE) for array in arrays]
    tensors[-1] = tensors[-1].view(len(rows), num_saves, 2)
    return StepStates(*tensors), inputs


def assert_same_state(cache: StateCache, block: int, other: StateCache, other_block: int) -> None:
    """Assert that two blocks have the same bits."""
    for found, expected in zip(cache, other, strict=True):
        if found is not None:
            assert expected is not None
            assert torch.equal(found[block], expected[other_block])
