from typing import Any

import pytest
import torch

from kernels.attention.paged_cache import FP8
from kernels.rotary import rotary_and_cache
from tests.aot.bounds import check, each_gpu
from tests.aot.compiler import compile_call

# Query heads, KV heads, head dim, rotary dim, float8 cache, norms, interleaved, scaled queries.
MODELS = {
    "Llama-3.1-8B": (32, 8, 128, 128, False, False, False, False),
    "Qwen3-8B, float8": (32, 8, 128, 128, True, True, False, False),
    "Qwen2.5-0.5B": (14, 2, 64, 64, False, False, False, False),
    "Phi-2": (32, 32, 80, 32, False, False, False, False),
    "Phi-3-mini, float8": (32, 32, 96, 96, True, False, False, False),
    "GLM-4-9B": (32, 2, 128, 64, False, False, True, False),
    "Ministral-3-8B, float8": (32, 8, 128, 128, True, False, False, True),
}


@each_gpu
@pytest.mark.parametrize("model", MODELS)
def test_models(model: str, gpu: str) -> None:
    heads, kv_heads, dim, rotary, float8, norms, interleaved, scaled = MODELS[model]
    tokens = 48

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    fused = empty(tokens, heads + 2 * kv_heads, dim)
    angles = empty(tokens, rotary // 2, dtype=torch.float32)
    cache = empty(64, 16, kv_heads, dim, dtype=FP8 if float8 else torch.bfloat16)
    options: dict[str, Any] = {"interleaved": interleaved}
    if norms:
        options |= {"query_norm": empty(dim), "key_norm": empty(dim)}
    if scaled:
        options["query_scale"] = empty(tokens, dtype=torch.float32)
    if float8:
        scale = empty(kv_heads, dtype=torch.float32)
        options |= {"key_scale": scale, "value_scale": scale}
    (kernel,) = found = compile_call(
        gpu,
        rotary_and_cache,
        *fused.split([heads, kv_heads, kv_heads], dim=1),
        angles,
        angles,
        cache,
        cache,
        empty(tokens, dtype=torch.int64),
        **options,
    )
    check(found)
    assert kernel.shared == 0, "a layout was converted"
    assert kernel.registers <= 64, "fewer than 4 programs fit a multiprocessor"
    sass = kernel.sass
    # Loads are 16 bytes wide for whole heads, or 4 where pairs are few.
    assert "LDG.E.128" in sass
    assert "LDG.E.U16" not in sass
    assert "STG.E.U16" not in sass
    assert "STG.E.U8" not in sass
    assert ("SATFINITE.E4M3" in sass) == (float8 and gpu != "sm_80")
