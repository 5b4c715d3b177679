"""Mixers that keep a state of a sequence, of one size, in place of the keys of all its tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from engine.layers.linear.linear import FloatLinear, parameter
from engine.layers.scheme import Scheme
from kernels.state.delta_rule import gated_delta_rule
from kernels.state.short_conv import short_conv
from kernels.state.states import StateCache, StepStates


class ShortConv(nn.Module):
    """A causal convolution of each channel over the last tokens, between two gates (LFM2)."""

    def __init__(
        self, hidden_size: int, channels: int, kernel: int, *, bias: bool, scheme: Scheme
    ) -> None:
        super().__init__()
        parts = {"in_proj": 3 * channels}
        self.in_proj = scheme.at("in_proj").linear(hidden_size, parts, bias=bias)
        self.out_proj = scheme.at("out_proj").linear(channels, {"out_proj": hidden_size}, bias=bias)
        self.conv_weight = parameter(channels, kernel, dtype=scheme.dtype, device=scheme.device)
        self.conv_bias: nn.Parameter | None = None
        if bias:
            self.conv_bias = parameter(channels, dtype=scheme.dtype, device=scheme.device)

    def forward(self, x: Tensor, cache: StateCache, step: StepStates) -> Tensor:
        """Return the output for `x`, both [T, hidden_size]; writes the blocks of `step`."""
        mixed = short_conv(self.in_proj(x), self.conv_weight, self.conv_bias, cache, step)
        out: Tensor = self.out_proj(mixed)
        return out


class DeltaNet(nn.Module):
    """Linear attention whose state the gated delta rule updates (Yang et al., 2024).

    Queries, keys and values go through a short convolution; the output is normalised by head and
    gated.

    Args:
        num_key_heads: heads of queries and keys, each of which serves several heads of values.
        gate: activation of the output's gate.
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
        scheme: Scheme,
    ) -> None:
        super().__init__()
        self._num_key_heads = num_key_heads
        self._norm_eps = norm_eps
        self._gate = gate
        channels = 2 * num_key_heads * key_dim + num_heads * value_dim
        self._sizes = [channels, num_heads * value_dim]
        inputs = {"in_proj_qkv": channels, "in_proj_z": num_heads * value_dim}
        self.in_proj = scheme.at("in_proj").linear(hidden_size, inputs, bias=False)
        self.gates: nn.Module = FloatLinear(
            hidden_size,
            {"in_proj_b": num_heads, "in_proj_a": num_heads},
            bias=False,
            dtype=scheme.dtype,
            device=scheme.device,
        )
        self.out_proj = scheme.at("out_proj").linear(
            num_heads * value_dim, {"out_proj": hidden_size}, bias=False
        )

        def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return parameter(*shape, dtype=dtype, device=scheme.device)

        self.conv_weight = numbers(channels, kernel, dtype=scheme.dtype)
        self.log_decay = numbers(num_heads)
        self.dt_bias = numbers(num_heads)
        self.norm_weight = numbers(value_dim)

    def forward(self, x: Tensor, cache: StateCache, step: StepStates) -> Tensor:
        """Return the output for `x`, both [T, hidden_size]; writes the blocks of `step`."""
        qkv, z = self.in_proj(x).split(self._sizes, dim=-1)
        beta, decay = self.gates(x).chunk(2, dim=-1)
        mixed = gated_delta_rule(
            qkv,
            z,
            beta,
            decay,
            conv_weight=self.conv_weight,
            decay=-self.log_decay.exp(),
            dt_bias=self.dt_bias,
            norm_weight=self.norm_weight,
            norm_eps=self._norm_eps,
            num_key_heads=self._num_key_heads,
            gate=self._gate,
            cache=cache,
            step=step,
        )
        out: Tensor = self.out_proj(mixed)
        return out
