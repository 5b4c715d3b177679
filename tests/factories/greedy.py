"""A random checkpoint with prompts, and what transformers continues them with, greedily."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer

VOCAB = 400
# Tests that run at the same time share a GPU.
SHARED_GPU = {"kv_cache_memory_bytes": 64 << 20}
_COMMON = 20  # tokens with which all longer prompts begin


@dataclass(frozen=True)
class Answer:
    """A continuation, and at each place the two most likely tokens with log-probabilities."""

    token_ids: list[int]
    top: list[dict[int, float]]


class GreedyCheckpoint:
    """A random model in float32, prompts, and transformers' answers to each of them alone.

    Args:
        path: the folder to write it to.
        lengths: of the prompts; those of more than 20 tokens share a prefix.
        max_tokens: of each answer.
        settings: of the configuration.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        *,
        lengths: Sequence[int],
        max_tokens: int,
        rope: str = "default",
        **settings: Any,
    ) -> None:
        self.path = path
        self.model = write_checkpoint(path, architecture, rope=rope, vocab_size=VOCAB, **settings)
        byte_level_tokenizer().save_pretrained(path)
        draw = random.Random(0)
        common = draw.choices(range(3, VOCAB), k=_COMMON)
        self.prompts = [
            (common if length > _COMMON else [])
            + draw.choices(range(3, VOCAB), k=length - (_COMMON if length > _COMMON else 0))
            for length in lengths
        ]
        self.sampling = SamplingParams(
            temperature=0, max_tokens=max_tokens, logprobs=2, ignore_eos=True
        )
        self.answers = [_answer(self.model, prompt, max_tokens) for prompt in self.prompts]

    def llm(self, device: torch.device, **settings: Any) -> LLM:
        """Return an engine for it on `device`, in float32 if `settings` say nothing else."""
        fields = {"device": device.type, "dtype": "float32", **SHARED_GPU, **settings}
        return LLM(str(self.path), **fields)

    def check(self, outputs: Sequence[RequestOutput], llm: LLM) -> None:
        """Assert that `outputs` are transformers' answers, and that `llm` has lost no block."""
        for output, answer in zip(outputs, self.answers, strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == answer.token_ids
            assert completion.logprobs is not None
            for position, expected in zip(completion.logprobs, answer.top, strict=True):
                found = {token: entry.logprob for token, entry in position.items()}
                assert found == pytest.approx(expected, abs=1e-4)
        check_blocks(llm)


def check_blocks(llm: LLM) -> None:
    """Assert that all blocks are free, and accounted for."""
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


@torch.inference_mode()
def _answer(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> Answer:
    ids, top = list(prompt), []
    for _ in range(max_tokens):
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), dim=-1)
        values, indices = logprobs.topk(2)
        top.append(dict(zip(indices.tolist(), values.tolist(), strict=True)))
        ids.append(int(indices[0]))
    return Answer(ids[len(prompt) :], top)
