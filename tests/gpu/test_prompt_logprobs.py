"""Log-probabilities of prompts equal transformers' in float32, beside captured steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.greedy import SHARED_GPU
from tests.factories.prompt_scores import PromptReference, check_prompts
from tests.factories.tokenizers import byte_level_tokenizer

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 129)
VOCAB = 397  # odd: rows of logits are padded


@pytest.mark.parametrize("num_top", [0, 5, 40])  # beyond 32 they are sorted
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 40, "max_num_seqs": 7}, {"num_gpu_blocks_override": 1 + 14}],
    ids=["whole", "chunked", "preempted"],
)
def test_they_are_those_of_transformers(
    tmp_path: Path, device: torch.device, settings: dict[str, Any], num_top: int
) -> None:
    sizes = {"vocab_size": VOCAB, "head_dim": 64, "max_position_embeddings": 256}
    model = write_checkpoint(tmp_path, eos_token_id=0, **sizes)
    byte_level_tokenizer().save_pretrained(tmp_path)
    draw, reference = random.Random(0), PromptReference(model)
    prompts = [reference.score(draw.choices(range(3, VOCAB), k=k)) for k in LENGTHS]
    limits = {"block_size": 16, "max_model_len": 192, "max_num_seqs": 16, "max_logprobs": 40}
    fields = {**SHARED_GPU, **limits, **settings}
    llm = LLM(str(tmp_path), device=device.type, dtype="float32", **fields)
    params = SamplingParams(temperature=0, max_tokens=20, prompt_logprobs=num_top, ignore_eos=True)
    token_ids = [prompt.token_ids for prompt in prompts]
    for _ in range(2):  # the second time with all prompts in the prefix cache
        check_prompts(llm.generate(token_ids, params, use_tqdm=False), prompts, num_top)
    llm.check_integrity()
