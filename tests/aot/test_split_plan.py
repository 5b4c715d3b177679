import pytest
import torch

from kernels.split_plan import plan_splits
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


@each_gpu
@pytest.mark.parametrize("num_sequences", [16, 256, 4096])
def test_plan(num_sequences: int, gpu: str) -> None:
    seq_lens = torch.empty(num_sequences, dtype=torch.int32, device="meta")
    check(compile_call(gpu, plan_splits, seq_lens, num_sequences + 66, 8, sliding_window=4096))
