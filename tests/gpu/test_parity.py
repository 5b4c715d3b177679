"""Greedy tokens and log-probabilities equal transformers' in float32, and nearly in bfloat16."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import RequestOutput
from tests.factories.families import FAMILIES
from tests.factories.greedy import GreedyCheckpoint, check_blocks

# Around the sizes of blocks, chunks and tiles; enough for several decode graphs.
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 47, 64, 65, 100, 129)
MAX_TOKENS = 12
SETTINGS: dict[str, Any] = {"block_size": 16, "max_model_len": 160, "max_num_seqs": 16}

_SHAPE = {
    "hidden_size": 128,
    "head_dim": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
# The vocabularies of the first two are odd: their heads are padded.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"rope": "llama3", "vocab_size": 397}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True, "num_attention_heads": 14, "vocab_size": 389},
    ),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 128}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 24}),
    "ministral3": FAMILIES["ministral3"],
    "glm-moe": FAMILIES["glm-moe"],
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def checkpoint(case: str, tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return make_checkpoint(case, tmp_path_factory.mktemp(case))


@pytest.fixture(scope="module")
def gentle(case: str, tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    """With smaller weights: attention to a single key amplifies small errors."""
    return make_checkpoint(case, tmp_path_factory.mktemp(case), initializer_range=0.1)


def make_checkpoint(case: str, path: Path, **settings: Any) -> GreedyCheckpoint:
    architecture, fields = CASES[case]
    return GreedyCheckpoint(
        path,
        architecture,
        **{"lengths": LENGTHS, "max_tokens": MAX_TOKENS, **_SHAPE, **fields, **settings},
    )


def test_in_a_mixed_batch(checkpoint: GreedyCheckpoint, device: torch.device) -> None:
    llm = checkpoint.llm(device, **SETTINGS, enable_prefix_caching=False)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)


def test_with_chunked_prefill_and_prefix_hits(
    checkpoint: GreedyCheckpoint, device: torch.device
) -> None:
    llm = checkpoint.llm(device, **SETTINGS, max_num_batched_tokens=24)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)
    again = llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False)
    checkpoint.check(again, llm)
    assert all(
        output.metrics.num_cached_tokens > 0
        for output in again
        if len(output.prompt_token_ids) > 32
    )


def test_under_preemption(case: str, tmp_path: Path, device: torch.device) -> None:
    """Outputs outgrow the block that is reserved for them when a prompt is admitted."""
    checkpoint = make_checkpoint(case, tmp_path, lengths=(15, 14, 13, 12, 31, 100), max_tokens=24)
    llm = checkpoint.llm(device, **SETTINGS, num_gpu_blocks_override=1 + 160 // 16)
    outputs = llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False)
    checkpoint.check(outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_long_prompts_beside_short_ones(
    tmp_path_factory: pytest.TempPathFactory, device: torch.device
) -> None:
    """Long enough for split-KV: several programs share a sequence's keys."""
    checkpoint = GreedyCheckpoint(
        tmp_path_factory.mktemp("long"),
        "LlamaForCausalLM",
        lengths=(3, 1500, 64, 700, 1023, 17),
        max_tokens=MAX_TOKENS,
        **{**_SHAPE, "max_position_embeddings": 2048},
    )
    settings = {**SETTINGS, "max_model_len": 1600, "max_num_batched_tokens": 300}
    llm = checkpoint.llm(device, **settings)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)


def test_in_bfloat16_the_error_is_that_of_the_type(
    gentle: GreedyCheckpoint, device: torch.device
) -> None:
    """Against float32 with the same rounded weights, the engine errs as much as transformers."""
    llm = gentle.llm(device, **SETTINGS, dtype="bfloat16", max_num_batched_tokens=64)
    outputs = llm.generate(gentle.prompts, gentle.sampling, use_tqdm=False)
    check_blocks(llm)
    rounded = gentle.model.bfloat16()
    theirs = [_logprobs(deepcopy(rounded).to(device), output).cpu() for output in outputs]
    exact = [_logprobs(deepcopy(rounded).float(), output) for output in outputs]
    ids = [torch.tensor(output.outputs[0].token_ids)[:, None] for output in outputs]
    chosen = [rows.gather(1, i) for rows, i in zip(exact, ids, strict=True)]
    error = _rms([_chosen(output) for output in outputs], chosen)
    typical = _rms(theirs, exact)
    assert error <= 1.5 * typical
    best = torch.cat([rows.amax(1, keepdim=True) for rows in exact])
    assert (best - torch.cat(chosen)).max() <= 8 * typical, "not one of the most likely tokens"


@torch.inference_mode()
def _logprobs(model: Any, output: RequestOutput) -> Tensor:
    """Return transformers' log-probabilities of all tokens at each position of an output."""
    token_ids = output.outputs[0].token_ids
    ids = torch.tensor([[*output.prompt_token_ids, *token_ids]], device=model.device)
    logits = model(ids).logits[0, -len(token_ids) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def _chosen(output: RequestOutput) -> Tensor:
    """Return the engine's log-probabilities of the chosen tokens."""
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return torch.tensor(
        [
            [position[token_id].logprob]
            for token_id, position in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
    )


def _rms(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return float((torch.cat(ours) - torch.cat(theirs)).square().mean().sqrt())
