"""Embeddings on our kernels equal transformers' in fp32, also from captured steps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from transformers import AutoModel

from engine import LLM
from kernels import device
from tests.factories.checkpoints import write_checkpoint
from tests.factories.embeddings import reference_embedding
from tests.factories.greedy import SHARED_GPU
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")


@pytest.mark.parametrize("captured", [False, True])
def test_they_are_those_of_transformers(tmp_path: Path, captured: bool) -> None:
    write_checkpoint(tmp_path, vocab_size=397, eos_token_id=0, num_hidden_layers=1, head_dim=32)
    byte_level_tokenizer().save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    llm = LLM(
        str(tmp_path),
        device=DEVICE.type,
        dtype="float32",
        block_size=16,
        max_model_len=48,
        max_num_seqs=3,
        max_num_batched_tokens=20,
        enforce_eager=not captured,
        **SHARED_GPU,
    )
    if captured and device.INTERPRETED:
        llm._core._runner.capture_graphs(ReplayingCapturer(), lambda done, total: None)
    draw = random.Random(0)
    prompts = [draw.choices(range(3, 397), k=k) for k in (1, 2, 17, 26)]
    for _ in range(2):  # the second time from the prefix cache
        many = llm.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
        for prompt, found in zip(prompts, many, strict=True):
            expected = reference_embedding(model, prompt)
            np.testing.assert_allclose(found.outputs.embedding, expected, atol=5e-6)
    llm.check_integrity()
