"""The decoder layers of a model as one C++ operation."""

from __future__ import annotations

from typing import Any

import torch


def decoder_layers(*, invariant: bool) -> Any:
    """Return an object that computes the layers added by `append`; see csrc/decoder_layers.h.

    Requires kernels for which `kernels.cpu.linear.runs` returns true. `invariant` is that of
    `kernels.cpu.linear`; attention does not split keys then.
    """
    return torch.classes.trident_cpu.DecoderLayers(invariant)
