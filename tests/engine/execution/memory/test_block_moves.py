"""The order of the moves of a step, on the copier that carries them out."""

from dataclasses import replace

import numpy as np
import torch

from engine.core.ragged import Int32s
from engine.execution.memory.kv_caches import move_blocks
from kernels.block_copy import BlockCopier
from tests.factories.sampling import EMPTY


def pairs(*moves: tuple[int, int]) -> Int32s:
    return np.array(moves, dtype=np.int32).reshape(-1, 2)


def test_nothing_is_overwritten_before_it_is_read() -> None:
    device = torch.arange(6.0)[:, None].repeat(1, 4)
    host = 10 + torch.arange(3.0)[:, None].repeat(1, 4)
    schedule = replace(
        EMPTY,
        swap_out=pairs((1, 0), (2, 1)),
        copies=pairs((3, 1), (1, 4)),  # block 1 went out, and has a new owner
        swap_in=pairs((2, 3), (0, 2)),  # 3 has been copied; host's 0 has just come
    )
    move_blocks(BlockCopier([device], [host]), schedule)
    assert host[:, 0].tolist() == [1, 2, 12]
    assert device[:, 0].tolist() == [0, 3, 1, 12, 1, 5]


def test_a_step_may_move_nothing() -> None:
    device = torch.ones(2, 4)
    move_blocks(BlockCopier([device]), EMPTY)
    assert device.eq(1).all()
