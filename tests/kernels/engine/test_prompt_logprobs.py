"""Log-probabilities of prompts on our kernels equal transformers' in fp32.

A small version of `tests/engine/test_prompt_logprobs.py`: the interpreter takes its time.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.greedy import SHARED_GPU
from tests.factories.prompt_scores import PromptReference, check_prompts
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

VOCAB = 397  # odd: rows of logits are padded


def test_in_chunks_of_several_prompts(tmp_path: Path) -> None:
    """More tokens per step than rows of logits, an odd number; and what is cached is not used."""
    model = write_checkpoint(
        tmp_path, vocab_size=VOCAB, eos_token_id=0, num_hidden_layers=1, head_dim=32
    )
    byte_level_tokenizer().save_pretrained(tmp_path)
    draw, reference = random.Random(0), PromptReference(model)
    prompts = [reference.score(draw.choices(range(3, VOCAB), k=k)) for k in (1, 2, 17, 26)]
    llm = LLM(
        str(tmp_path),
        device=DEVICE.type,
        dtype="float32",
        block_size=16,
        max_model_len=48,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        **SHARED_GPU,
    )
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, ignore_eos=True)
    token_ids = [prompt.token_ids for prompt in prompts]
    for _ in range(2):
        check_prompts(llm.generate(token_ids, params, use_tqdm=False), prompts, 3)
    llm.check_integrity()
