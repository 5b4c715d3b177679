"""Builds a model without weights from its spec."""

from __future__ import annotations

import torch

from engine.layers.scheme import Unquantized
from engine.models.causal_lm import CausalLM
from engine.models.spec import ModelSpec


def build_model(
    spec: ModelSpec, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Build the model of `spec` on `device`, its parameters allocated and not initialised.

    `engine.weights.initialise_weights` fills them. The rotary tables have `max_model_len` rows.
    """
    return CausalLM(spec, Unquantized(dtype, device), max_model_len=max_model_len).eval()
