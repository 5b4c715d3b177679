import pytest
import torch

from kernels.block_copy import BlockCopier
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Block size, KV heads, head dim, dtype: Llama-3.1-8B, a partial piece, a piece for one warp.
BLOCKS = [
    (16, 8, 128, torch.bfloat16),
    (16, 5, 80, torch.float16),
    (16, 1, 64, torch.float8_e4m3fn),
]


@each_gpu
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_copies_are_sixteen_bytes_wide(block: tuple[int, int, int, torch.dtype], gpu: str) -> None:
    *shape, dtype = block
    caches = [torch.empty(64, *shape, dtype=dtype, device="meta") for _ in range(4)]
    (kernel,) = found = compile_call(gpu, BlockCopier(caches).copy, [1, 2], [2, 3])
    check(found)
    sass = kernel.sass
    assert sass.count("STG.E.128") == sass.count("STG.E") > 0
    # The other loads are block ids and addresses.
    assert sass.count("LDG.E.128") == sass.count("STG.E.128")


def test_swaps() -> None:
    shape = (16, 8, 128)
    caches, host = (
        [torch.empty(blocks, *shape, dtype=torch.bfloat16, device="meta") for _ in range(2)]
        for blocks in (64, 8)
    )
    copier = BlockCopier(caches, host)
    check(compile_call("sm_90", copier.swap_out, [60], [1]))
    check(compile_call("sm_90", copier.swap_in, [1], [60]))
