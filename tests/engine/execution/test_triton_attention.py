"""What the GPU backend refuses when the engine starts; tests/kernels shows what it computes."""

from dataclasses import replace

import pytest
import torch

from engine.demo import CHECKPOINT_DIR
from engine.errors import UnsupportedError
from engine.execution.triton_attention import TritonAttention
from engine.models.model_config import ModelConfig


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(CHECKPOINT_DIR)


@pytest.mark.parametrize("block_size", [1, 8, 48, 128])
def test_blocks_of_another_size_are_refused(block_size: int) -> None:
    with pytest.raises(UnsupportedError, match=r"block_size: must be 16, 32 or 64"):
        TritonAttention(block_size)


def test_the_bundled_model_is_served(config: ModelConfig) -> None:
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        TritonAttention(16).check(config, dtype)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"head_dim": 24}, "head_dim: must be a multiple of 16"),
        ({"head_dim": 16}, "head_dim: must be .* from 32 to 256"),
        ({"head_dim": 272}, "head_dim: must be .* from 32 to 256"),
        ({"num_heads": 48, "num_kv_heads": 2}, "num_key_value_heads: at most 16 query heads"),
    ],
)
def test_heads_of_another_shape_are_refused(
    config: ModelConfig, changes: dict[str, int], text: str
) -> None:
    with pytest.raises(UnsupportedError, match=text):
        TritonAttention(64).check(replace(config, **changes), torch.bfloat16)
