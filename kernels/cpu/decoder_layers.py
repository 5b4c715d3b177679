"""The decoder layers of the Llama family as one C++ operation."""

from __future__ import annotations

from typing import Any

import torch


def decoder_layers(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm_eps: float,
    interleaved: bool,
    invariant: bool,
) -> Any:
    """Return an object that computes the layers added by `append`; see csrc/library.cpp.

    Requires kernels for which `kernels.cpu.linear.runs` returns true. `interleaved` is that
    of `kernels.rotary`, `invariant` that of `kernels.cpu.linear`; attention does not split keys
    then.
    """
    return torch.classes.trident_cpu.DecoderLayers(
        num_heads, num_kv_heads, head_dim, norm_eps, interleaved, invariant
    )
