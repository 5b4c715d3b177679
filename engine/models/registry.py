"""Architectures that Trident serves; their modules are imported when one is built."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from engine.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from engine.models.causal_lm import CausalLM
    from engine.models.model_config import ModelConfig

# Architecture, which is also the name of its class -> the module that defines it.
MODELS: dict[str, str] = {
    "LlamaForCausalLM": "engine.models.llama",
    "MistralForCausalLM": "engine.models.mistral",
    "Qwen2ForCausalLM": "engine.models.qwen2",
    "Qwen3ForCausalLM": "engine.models.qwen3",
}


def build_model(
    config: ModelConfig, *, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> CausalLM:
    """Build the model of `config` on `device`, its parameters allocated and not initialised.

    `engine.weights.initialise_weights` fills them. The rotary tables have `max_model_len` rows.
    """
    module = importlib.import_module(MODELS[config.architecture])
    model: CausalLM = getattr(module, config.architecture)(
        config, max_model_len=max_model_len, dtype=dtype, device=device
    )
    return model.eval()


def check_architecture(architectures: list[str]) -> str:
    """Return the first architecture of a checkpoint that Trident serves.

    Raises:
        UnsupportedError: it serves none of them.
    """
    for name in architectures:
        if name in MODELS:
            return name
    raise UnsupportedError(
        f"config.json: architectures: {', '.join(architectures) or 'none'} is not supported; "
        f"supported: {', '.join(MODELS)}"
    )
