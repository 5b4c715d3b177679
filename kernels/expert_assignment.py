"""Assignment of tokens to the experts of a mixture, in blocks of rows that have one expert each.

Shapes depend on the number of tokens alone and the host reads nothing: a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.checks import check_dtype, check_shape


class Assignment(NamedTuple):
    """Places of the rows (token i, choice j), which are numbered i * top_k + j.

    Attributes:
        rows: int32 [num_blocks * block_size], the row in each place; num_rows: none. A block's
            rows have the same expert, and come in ascending order.
        block_experts: int32 [num_blocks], the expert of each block; num_experts: the block is idle.
    """

    rows: Tensor
    block_experts: Tensor


def assign_to_experts(expert_ids: Tensor, num_experts: int, block_size: int) -> Assignment:
    """Divide the rows of `expert_ids` among blocks.

    Args:
        expert_ids: int64 [T, top_k], the experts that each token has chosen, each once.
        num_experts: all ids are below.
        block_size: places of a block.

    Raises:
        ValueError: an argument has a wrong shape or dtype.
    """
    check_dtype("expert_ids", expert_ids, torch.int64)
    check_shape("expert_ids", expert_ids, (None, None))
    flat, device = expert_ids.flatten(), expert_ids.device
    num_rows = len(flat)
    # Each expert that has rows leaves at most one block partly empty.
    most = num_rows + min(num_experts, num_rows) * (block_size - 1)
    num_blocks = -(-most // block_size)
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts.index_add_(0, flat, torch.ones_like(flat))
    sizes = (counts + block_size - 1) // block_size * block_size
    ends = sizes.cumsum(0)
    # From a row's number among the sorted ones to its place.
    shift = (ends - sizes) - (counts.cumsum(0) - counts)
    places = torch.arange(num_rows, device=device) + shift[flat[order]]
    rows = torch.full((num_blocks * block_size,), num_rows, dtype=torch.int32, device=device)
    rows[places] = order.int()
    firsts = torch.arange(num_blocks, device=device) * block_size
    return Assignment(rows, torch.searchsorted(ends, firsts, right=True, out_int32=True))
