"""Activation functions of gated MLPs, numbered as in csrc/activation.h."""

from __future__ import annotations

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh"]

ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
