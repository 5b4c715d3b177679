"""The decoder layers of the Llama family as one operation of the kernels in C++."""

from __future__ import annotations

from typing import Any

import torch


def decoder_layers(*, num_heads: int, num_kv_heads: int, head_dim: int, norm_eps: float) -> Any:
    """Return an object that computes layers, which it gets by `append`; see csrc/decoder_layers.h.

    The kernels must be those that `kernels.cpu.linear.serves` with.
    """
    return torch.classes.trident_cpu.DecoderLayers(num_heads, num_kv_heads, head_dim, norm_eps)
