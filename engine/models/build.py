"""Builds a model without weights from the configuration of a checkpoint."""

from __future__ import annotations

import importlib

import torch

from engine.models.causal_lm import CausalLM
from engine.models.model_config import ModelConfig
from engine.models.registry import ARCHITECTURES


def build_model(
    config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Build the model of `config` on `device`, its parameters allocated and not initialised.

    `engine.weights.initialise_weights` fills them. The rotary tables have `max_model_len` rows.
    """
    module = importlib.import_module(ARCHITECTURES[config.architecture].module)
    model: CausalLM = getattr(module, config.architecture)(
        config, max_model_len=max_model_len, dtype=dtype, device=device
    )
    return model.eval()
