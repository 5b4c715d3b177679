"""A model with its weights on its device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine.execution.devices import ResolvedConfig
from engine.execution.memory.kv_cache_plan import require_room_for_weights
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.conversion import check_quantization, convert_weights, num_copied_bytes
from engine.models.model_config import ModelConfig
from engine.weights import initialise_weights


def load_weights(
    checkpoint: Path,
    model_config: ModelConfig,
    config: ResolvedConfig,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[int, int], None] | None = None,
) -> CausalLM:
    """Return the model of `checkpoint`; `on_progress` is called with (loaded, total) bytes.

    Raises:
        CheckpointError: the checkpoint is incomplete or broken.
        InsufficientMemoryError: the weights do not fit.
        UnsupportedError: the device cannot compute with them as the settings ask for.
    """
    check_quantization(config.quantization, device, dtype)
    build = partial(build_model, model_config, max_model_len=max_model_len, dtype=dtype)
    outline = build(device=torch.device("meta"))  # shapes alone, nothing is allocated
    num_bytes = sum(p.nbytes for p in outline.parameters())
    num_bytes += num_copied_bytes(outline, config.quantization, device)
    require_room_for_weights(num_bytes, device, config)
    model = build(device=device)
    initialise_weights(
        model,
        checkpoint,
        load_format=config.load_format,
        seed=config.seed,
        on_progress=on_progress,
    )
    convert_weights(model, config.quantization)
    return model
