"""Mixers that keep a state of a sequence, of one size, in place of the keys of all its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear.linear import FloatLinear, parameter
from engine.layers.scheme import Scheme
from kernels.state.delta_rule import gated_delta_rule
from kernels.state.short_conv import short_conv
from kernels.state.ssd import ssd
from kernels.state.states import StateCache, StepStates


class StateMixer(nn.Module):
    """A mixer whose inputs go through a short convolution.

    Attributes:
        in_proj, out_proj: its projections.
        conv_weight: [channels, taps].
        conv_bias: [channels] or None.

    Args:
        inputs: parts of the first projection.
        size: features that the second one takes.
        channels, kernel: of the convolution.
        bias, conv_bias: whether the projections, and the convolution, have biases.
    """

    def __init__(
        self,
        hidden_size: int,
        inputs: Mapping[str, int],
        size: int,
        channels: int,
        kernel: int,
        *,
        bias: bool = False,
        conv_bias: bool = False,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        self.in_proj = scheme.at("in_proj").linear(hidden_size, inputs, bias=bias)
        self.out_proj = scheme.at("out_proj").linear(size, {"out_proj": hidden_size}, bias=bias)
        dtype, device = scheme.dtype, scheme.device
        self.conv_weight = parameter(channels, kernel, dtype=dtype, device=device)
        self.conv_bias: nn.Parameter | None = None
        if conv_bias:
            self.conv_bias = parameter(channels, dtype=dtype, device=device)
        self._invariant = False

    def process_weights(self, *, invariant: bool) -> None:
        """Lay the weights out as kernels read them, after loading.

        Args:
            invariant: a token's result does not depend on how its sequence is cut into steps.
        """
        by_tap = self.conv_weight.detach().t().contiguous()
        self.conv_weight.data = by_tap.t()
        self._invariant = invariant


class _DecayingMixer(StateMixer):
    """A mixer with heads whose states decay, and with a norm of the output.

    Attributes:
        log_decay, dt_bias: float32 [num_heads].
        norm_weight: float32, of one head or of all.
    """

    def _add_heads(self, num_heads: int, norm_size: int, device: torch.device) -> None:
        """Allocate the parameters of the heads."""
        self.log_decay = parameter(num_heads, dtype=torch.float32, device=device)
        self.dt_bias = parameter(num_heads, dtype=torch.float32, device=device)
        self.norm_weight = parameter(norm_size, dtype=torch.float32, device=device)
        self._decay: Tensor | None = None

    @property
    def decay(self) -> Tensor:
        """-exp(log_decay), float32 [num_heads]: by which the time steps of a head are scaled."""
        return -self.log_decay.exp() if self._decay is None else self._decay

    def process_weights(self, *, invariant: bool) -> None:
        super().process_weights(invariant=invariant)
        self._decay = self.decay


class ShortConv(StateMixer):
    """A causal convolution of each channel over the last tokens, between two gates (LFM2)."""

    def __init__(
        self, hidden_size: int, channels: int, kernel: int, *, bias: bool, scheme: Scheme
    ) -> None:
        super().__init__(
            hidden_size,
            {"in_proj": 3 * channels},
            channels,
            channels,
            kernel,
            bias=bias,
            conv_bias=bias,
            scheme=scheme,
        )

    def forward(self, x: Tensor, cache: StateCache, step: StepStates) -> Tensor:
        """Return the output for `x`, both [T, hidden_size]; writes the blocks of `step`."""
        mixed = short_conv(self.in_proj(x), self.conv_weight, self.conv_bias, cache, step)
        out: Tensor = self.out_proj(mixed)
        return out


class DeltaNet(_DecayingMixer):
    """Linear attention whose state the gated delta rule updates (Yang et al., 2024).

    Queries, keys and values go through a short convolution; the output is normalised by head and
    gated.

    Args:
        num_key_heads: heads of queries and keys, each of which serves several heads of values.
        gate: activation of the output's gate.
        by_key_head: as in `engine.models.spec.DeltaSpec`.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_key_heads: int,
        num_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        norm_eps: float,
        gate: Literal["silu", "sigmoid"],
        by_key_head: bool = False,
        scheme: Scheme,
    ) -> None:
        # Values of a key head, and of each kind of what is side by side for it.
        per_head = num_heads // num_key_heads
        values, size = per_head * value_dim, num_heads * value_dim
        channels = 2 * num_key_heads * key_dim + size
        inputs = {"in_proj_qkv": channels, "in_proj_z": size}
        gates = {"in_proj_b": num_heads, "in_proj_a": num_heads}
        if by_key_head:
            inputs = {"in_proj_qkvz": channels + size}
            gates = {"in_proj_ba": 2 * num_heads}
        super().__init__(hidden_size, inputs, size, channels, kernel, scheme=scheme)
        self._add_heads(num_heads, value_dim, scheme.device)
        self._num_key_heads = num_key_heads
        self._norm_eps = norm_eps
        self._gate = gate
        self._sizes = [channels, size]
        self._head_sizes = [key_dim, key_dim, values, values] if by_key_head else None
        self._head_gates = [per_head, per_head]
        self.gates: nn.Module = FloatLinear(
            hidden_size,
            gates,
            bias=False,
            dtype=scheme.dtype,
            device=scheme.device,
        )

    def forward(self, x: Tensor, cache: StateCache, step: StepStates) -> Tensor:
        """Return the output for `x`, both [T, hidden_size]; writes the blocks of `step`."""
        inputs, gates = self.in_proj(x), self.gates(x)
        if self._head_sizes is None:
            qkv, z = inputs.split(self._sizes, dim=-1)
            beta, decay = gates.chunk(2, dim=-1)
        else:
            *parts, z = self._by_kind(inputs, self._head_sizes)
            qkv = torch.cat(parts, dim=-1)
            beta, decay = self._by_kind(gates, self._head_gates)
        mixed = gated_delta_rule(
            qkv,
            z,
            beta,
            decay,
            conv_weight=self.conv_weight,
            decay=self.decay,
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            norm_eps=self._norm_eps,
            num_key_heads=self._num_key_heads,
            gate=self._gate,
            cache=cache,
            step=step,
            is_invariant=self._invariant,
        )
        out: Tensor = self.out_proj(mixed)
        return out

    def _by_kind(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        """Return what the key heads have side by side, each kind of all heads together."""
        by_head = x.view(len(x), self._num_key_heads, -1)
        return [part.flatten(1) for part in torch.split(by_head, sizes, dim=-1)]


class Mamba2(_DecayingMixer):
    """A state space model by heads, after a short convolution (Mamba 2; Dao and Gu, 2024).

    The output is gated, then normalised over the heads of each group.

    Args:
        head_dim, state_size: dimensions of the values of a head, and of its state for each of them.
        num_groups: of heads that share what they put into their states and read of them.
        conv_bias, bias: whether the convolution, and the projections, have biases.
        dt_limits: least and largest time step.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        state_size: int,
        num_groups: int,
        kernel: int,
        conv_bias: bool,
        bias: bool,
        dt_limits: tuple[float, float],
        norm_eps: float,
        scheme: Scheme,
    ) -> None:
        size = num_heads * head_dim
        channels = size + 2 * num_groups * state_size
        sizes = [size, channels, num_heads]
        super().__init__(
            hidden_size,
            {"in_proj": sum(sizes)},
            size,
            channels,
            kernel,
            bias=bias,
            conv_bias=conv_bias,
            scheme=scheme,
        )
        self._add_heads(num_heads, size, scheme.device)
        self._sizes = sizes
        self._num_groups = num_groups
        self._dt_limits = dt_limits
        self._norm_eps = norm_eps
        self.skip = parameter(num_heads, dtype=torch.float32, device=scheme.device)

    def forward(self, x: Tensor, cache: StateCache, step: StepStates) -> Tensor:
        """Return the output for `x`, both [T, hidden_size]; writes the blocks of `step`."""
        gate, inputs, time_steps = self.in_proj(x).split(self._sizes, dim=-1)
        mixed = ssd(
            inputs,
            time_steps,
            conv_weight=self.conv_weight,
            conv_bias=self.conv_bias,
            decay=self.decay,
            dt_bias=self.dt_bias,
            dt_limits=self._dt_limits,
            skip=self.skip,
            num_groups=self._num_groups,
            cache=cache,
            step=step,
        )
        groups = (len(mixed), self._num_groups, -1)
        gated = (mixed * F.silu(gate.float())).view(groups)
        normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + self._norm_eps)
        out: Tensor = self.out_proj((normed.flatten(1) * self.norm_weight).to(x.dtype))
        return out
