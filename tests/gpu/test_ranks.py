"""Ranks with a GPU each give the tokens of one GPU; no machine with two has run this yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SHAPE = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "intermediate_size": 256}
PROMPTS = [[5, 6, 7], list(range(20, 90)), [9] * 40]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"enforce_eager": True}),
        ("LlamaForCausalLM", {"deterministic": True}),
        ("MixtralForCausalLM", {"enable_expert_parallel": True}),
    ],
)
def test_ranks_give_the_tokens_of_one_device(
    architecture: str, settings: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    write_checkpoint(tmp_path, architecture, vocab_size=400, initializer_range=0.1, **SHAPE)
    byte_level_tokenizer().save_pretrained(tmp_path)
    found = []
    for size in (1, 2):
        llm = LLM(
            str(tmp_path),
            device=device.type,
            dtype="float32",
            max_model_len=128,
            tensor_parallel_size=size,
            **settings,
        )
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found.append([list(output.outputs[0].token_ids) for output in outputs])
        del llm
    assert found[0] == found[1]
