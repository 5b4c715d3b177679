"""Random LoRA adapters, made and merged by PEFT."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel


def write_adapter(path: Path, model: PreTrainedModel, base: Path, **config: Any) -> PreTrainedModel:
    """Write an adapter of `model`, which lies in the folder `base`, to the folder `path`.

    Args:
        config: of `LoraConfig`.

    Returns:
        The model with the adapter merged into it by PEFT, in place.
    """
    model.name_or_path = str(base)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")  # its advice, and what it still uses of transformers
        torch.manual_seed(0)  # the same A whatever ran before
        adapted = get_peft_model(model, LoraConfig(**config))
        generator = torch.Generator().manual_seed(0)
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # what was trained; B is zero at first
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.data = parameter.data + 0.3 * noise
        adapted.save_pretrained(path)
        merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.eval()
