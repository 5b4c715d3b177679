"""The decoder layers of the Llama family as one C++ operation."""

from __future__ import annotations

from typing import Any

import torch


def decoder_layers(
    *, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float, split_keys: bool
) -> Any:
    """Return an object that computes the layers added by `append`; see csrc/decoder_layers.h.

    Requires kernels for which `kernels.cpu.linear.runs` returns true. `split_keys` is that of
    `kernels.cpu.attention`; all else depends on its own token alone in any case.
    """
    return torch.classes.trident_cpu.DecoderLayers(
        num_heads, num_kv_heads, head_dim, norm_eps, split_keys
    )
