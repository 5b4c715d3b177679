import pytest
import torch

from kernels.attention.split_plan import plan_splits
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


@each_gpu
@pytest.mark.parametrize("num_sequences", [16, 256, 4096])
def test_plan(num_sequences: int, gpu: str) -> None:
    seq_lens = torch.empty(num_sequences, dtype=torch.int32, device="meta")
    check(compile_call(gpu, plan_splits, seq_lens, num_sequences + 66, 8, sliding_window=4096))


def test_every_number_of_sequences_and_work_items_runs_the_same_code() -> None:
    """Up to the next power of two of sequences; beyond it, tiles differ."""
    codes = set()
    for num_sequences, num_work_items in ((17, 83), (32, 96), (31, 97)):
        seq_lens = torch.empty(40, dtype=torch.int32, device="meta")[3 : 3 + num_sequences]
        (kernel,) = compile_call("sm_90", plan_splits, seq_lens, num_work_items, 8)
        codes.add(kernel.cubin)
    assert len(codes) == 1
