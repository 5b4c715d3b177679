import pytest
import torch

from kernels.sampling.draw import sample_tokens
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


@each_gpu
@pytest.mark.parametrize("vocab", [32000, 128256, 151936, 262144])
def test_draw(vocab: int, gpu: str) -> None:
    rows = 64
    floats, longs = _meta(torch.float32, rows), _meta(torch.int64, rows)
    check(
        compile_call(
            gpu,
            sample_tokens,
            _meta(torch.float32, rows, vocab),
            floats,
            _meta(torch.int32, rows),
            floats,
            floats,
            longs,
            longs,
        )
    )
