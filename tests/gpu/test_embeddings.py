"""Embeddings equal transformers' in float32, from captured steps too, beside who generates."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from engine import LLM, SamplingParams
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from tests.factories.checkpoints import write_checkpoint
from tests.factories.embeddings import reference_embedding
from tests.factories.greedy import SHARED_GPU
from tests.factories.tokenizers import byte_level_tokenizer

LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 129)
VOCAB = 397


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_num_batched_tokens": 40, "max_num_seqs": 7}, {"num_gpu_blocks_override": 1 + 14}],
    ids=["whole", "chunked", "preempted"],
)
def test_they_are_those_of_transformers(
    tmp_path: Path, device: torch.device, settings: dict[str, Any]
) -> None:
    sizes = {"vocab_size": VOCAB, "head_dim": 64, "max_position_embeddings": 256}
    write_checkpoint(tmp_path, eos_token_id=0, **sizes)
    byte_level_tokenizer().save_pretrained(tmp_path)
    model = AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    draw = random.Random(0)
    prompts = [draw.choices(range(3, VOCAB), k=length) for length in LENGTHS]
    limits = {"block_size": 16, "max_model_len": 192, "max_num_seqs": 16}
    fields = {**SHARED_GPU, **limits, **settings}
    llm = LLM(str(tmp_path), device=device.type, dtype="float32", **fields)
    generates = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    alone = llm.generate(prompts, generates, use_tqdm=False)
    expected = [each.outputs[0].token_ids for each in alone]
    core, found, tokens = llm._core, {}, dict[int, list[int]]()
    asked = (generates.model_dump(exclude_defaults=True), {"return_embedding": True})
    pairs = [(prompt, sampling) for prompt in prompts for sampling in asked]
    for uid, (prompt, sampling) in enumerate(pairs):
        core.add_request(AddRequest(10**6 + uid, pack_token_ids(prompt), sampling))
    while core.has_unfinished_requests():
        for output in core.step().rows():
            number, is_embedding = divmod(output.uid - 10**6, 2)
            if is_embedding:
                assert output.embedding is not None
                found[number] = np.frombuffer(output.embedding, dtype="<f4")
            else:
                tokens.setdefault(number, []).extend(output.token_ids)
    assert [tokens[number] for number in range(len(prompts))] == expected
    for number, prompt in enumerate(prompts):
        np.testing.assert_allclose(found[number], reference_embedding(model, prompt), atol=1e-5)
    llm.check_integrity()
