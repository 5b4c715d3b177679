"""The values of GGUF's blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def dequantize_blocks(blocks: Tensor, type_name: str) -> Tensor:
    """Return the values of rows of blocks, in float32.

    Args:
        blocks: uint8 [..., bytes]
    """
    import gguf  # here: few checkpoints need it

    kind = gguf.GGMLQuantizationType[type_name]
    with np.errstate(invalid="ignore", over="ignore"):  # of scales, which are checked
        values = gguf.quants.dequantize(blocks.cpu().numpy(), kind)
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(blocks.device)
