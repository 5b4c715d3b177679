"""Attention sinks (Xiao et al., 2023; gpt-oss): a learned score per head without a key or a value.

It takes part in the softmax, so that the weights of the keys sum to less than 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the weights of the keys, the softmax over the last dimension of `scores`.

    Args:
        scores: float32 [..., keys].
        sinks: float32, broadcast to `scores` without its last dimension; None: there are none.
    """
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def check_sinks(query: Tensor, sinks: Tensor | None) -> None:
    """Raise unless `sinks` is None, or float32 [H] for `query` [any, H, D]."""
    if sinks is not None:
        check_dtype("sinks", sinks, torch.float32)
        check_shape("sinks", sinks, (query.shape[1],))
        check_device("sinks", sinks, query.device)
        check_contiguous("sinks", sinks)
