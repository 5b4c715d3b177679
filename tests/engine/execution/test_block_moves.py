"""The order of the moves of a step, on the copier that carries them out."""

import torch

from engine.core.kv_cache_manager import BlockCopy
from engine.execution.block_moves import move_blocks
from kernels.block_copy import BlockCopier


def test_nothing_is_overwritten_before_it_is_read() -> None:
    device = torch.arange(6.0)[:, None].repeat(1, 4)
    host = 10 + torch.arange(3.0)[:, None].repeat(1, 4)
    move_blocks(
        BlockCopier([device], [host]),
        swap_out=[BlockCopy(1, 0), BlockCopy(2, 1)],
        copies=[BlockCopy(3, 1), BlockCopy(1, 4)],  # block 1 went out, and has a new owner
        swap_in=[BlockCopy(2, 3), BlockCopy(0, 2)],  # 3 has been copied; host's 0 has just come
    )
    assert host[:, 0].tolist() == [1, 2, 12]
    assert device[:, 0].tolist() == [0, 3, 1, 12, 1, 5]


def test_a_step_may_move_nothing() -> None:
    device = torch.ones(2, 4)
    move_blocks(BlockCopier([device]), swap_out=[], copies=[], swap_in=[])
    assert device.eq(1).all()
