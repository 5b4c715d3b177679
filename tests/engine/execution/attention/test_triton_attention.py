"""What the GPU backend refuses when the engine starts; tests/kernels shows what it computes."""

from typing import Any

import pytest
import torch

from engine.demo import CHECKPOINT_DIR
from engine.errors import UnsupportedError
from engine.execution.attention.triton_attention import TritonAttention
from engine.models.registry import read_model_spec
from tests.factories.errors import refuses

SERVED: dict[str, Any] = {
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "kv_cache_dtype": torch.bfloat16,
}


@pytest.mark.parametrize("block_size", [1, 8, 48, 128])
def test_blocks_of_another_size_are_refused(block_size: int) -> None:
    with refuses("unsupported", "block_size"):
        TritonAttention(block_size)


@pytest.mark.parametrize("kv_cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_the_bundled_model_is_served(kv_cache_dtype: torch.dtype) -> None:
    config = read_model_spec(CHECKPOINT_DIR)
    TritonAttention(16).check(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        kv_cache_dtype=kv_cache_dtype,
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 24}, "head_dim: must be a multiple of 16"),
        ({"head_dim": 16}, "head_dim: must be .* from 32 to 256"),
        ({"head_dim": 272}, "head_dim: must be .* from 32 to 256"),
        ({"num_heads": 48, "num_kv_heads": 2}, "num_key_value_heads: at most 16 query heads"),
    ],
)
def test_heads_of_another_shape_are_refused(changes: dict[str, int], text: str) -> None:
    TritonAttention(64).check(**SERVED)
    with pytest.raises(UnsupportedError, match=text):
        TritonAttention(64).check(**{**SERVED, **changes})
