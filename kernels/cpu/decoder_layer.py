"""A decoder layer of the Llama family as one operation of the kernels in C++."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def decoder_layer(
    tensors: Mapping[str, Tensor],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_eps: float,
    sliding_window: int | None,
) -> Any:
    """Return an object whose `forward` computes a layer; see csrc/decoder_layer.h.

    The kernels must be those that `kernels.cpu.linear.serves` with.

    Args:
        tensors: by name: `weight` of `input_layernorm`, `post_attention_layernorm`, and `q_norm`
            and `k_norm` if there are; `weight`, `scale` and `bias` of `qkv_proj`, `o_proj`,
            `gate_up_proj`, which is a gated one, and `down_proj`, as `linear` takes them.
    """
    return torch.classes.trident_cpu.DecoderLayer(
        dict(tensors), num_heads, num_kv_heads, head_dim, norm_eps, sliding_window
    )
