"""Greedy tokens and log-probabilities equal transformers' in fp32, however requests are batched."""

from __future__ import annotations

import random
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
EOS = 0
NUM_PROMPTS = 20
MAX_TOKENS = 14
BLOCK_SIZE = 4
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=0)

# Architecture, rope scaling, and what else the configuration sets. Trained positions are few, so
# that the outputs of longer prompts go beyond them, where dynamic scaling begins. (No prompt is of
# exactly that length: transformers then keeps the scaling of whatever it ran before.)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "default", {}),
    "llama-linear": ("LlamaForCausalLM", "linear", {}),
    "llama-dynamic": ("LlamaForCausalLM", "dynamic", {"max_position_embeddings": 24}),
    "llama-yarn": ("LlamaForCausalLM", "yarn", {}),
    "llama-llama3": ("LlamaForCausalLM", "llama3", {}),
    "llama-untied-mha": ("LlamaForCausalLM", "default", {"num_key_value_heads": 4}),
    "llama-tied": ("LlamaForCausalLM", "default", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "default", {}),
    "qwen2-yarn": ("Qwen2ForCausalLM", "yarn", {}),
    "qwen3": ("Qwen3ForCausalLM", "default", {}),
    "qwen3-yarn": ("Qwen3ForCausalLM", "yarn", {}),
    "mistral": ("MistralForCausalLM", "default", {}),
    "mistral-sliding-window": ("MistralForCausalLM", "default", {"sliding_window": 9}),
}

# What the scheduler does to a sequence is the same for each family: there, a few stand for all.
each_mode = pytest.mark.parametrize(
    "reference",
    [
        name
        if name in ("llama", "qwen3", "mistral-sliding-window")
        else pytest.param(name, marks=pytest.mark.large)
        for name in CASES
    ],
    indirect=True,
)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Reference:
    """What transformers answers to each prompt, alone."""

    checkpoint: Path
    prompts: list[list[int]]
    token_ids: list[list[int]]
    logprobs: list[list[float]]


@pytest.fixture(scope="module", params=CASES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    architecture, rope, settings = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(
        path, architecture, rope=rope, vocab_size=VOCAB, eos_token_id=EOS, **settings
    )
    byte_level_tokenizer().save_pretrained(path)
    rng = random.Random(request.param)
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 22, 23, *(rng.randint(1, 23) for _ in range(7))]
    common = [rng.randrange(1, VOCAB) for _ in range(12)]
    prompts = []
    for i, length in enumerate(lengths):
        prefix = common[: length // 2] if i % 2 else []
        prompts.append(prefix + [rng.randrange(1, VOCAB) for _ in range(length - len(prefix))])
    answers = [_generate(model, prompt) for prompt in prompts]
    return Reference(
        path, prompts, [ids for ids, _ in answers], [logprobs for _, logprobs in answers]
    )


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompt: list[int]) -> tuple[list[int], list[float]]:
    ids = torch.tensor([prompt])
    generated = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    token_ids = generated.sequences[0, len(prompt) :].tolist()
    logprobs = [
        torch.log_softmax(logits[0], dim=-1)[token_id].item()
        for logits, token_id in zip(generated.logits, token_ids, strict=True)
    ]
    return token_ids, logprobs


def make_llm(reference: Reference, **settings: Any) -> LLM:
    return LLM(
        str(reference.checkpoint),
        dtype="float32",
        **{"block_size": BLOCK_SIZE, "max_model_len": 40, "max_num_seqs": 32, **settings},
    )


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def ahead(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"async_scheduling": request.param}


def check(reference: Reference, outputs: list[RequestOutput], llm: LLM) -> None:
    for i, output in enumerate(outputs):
        completion = output.outputs[0]
        assert completion.token_ids == reference.token_ids[i], f"prompt {i}"
        assert completion.logprobs is not None
        found = [next(iter(position.values())).logprob for position in completion.logprobs]
        assert found == pytest.approx(reference.logprobs[i], abs=1e-4), f"prompt {i}"
        expected_reason = "stop" if reference.token_ids[i][-1] == EOS else "length"
        assert completion.finish_reason == expected_reason
    assert len(outputs) == NUM_PROMPTS
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


def test_alone(reference: Reference) -> None:
    llm = make_llm(reference, enable_prefix_caching=False)
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in reference.prompts]
    check(reference, outputs, llm)


def test_in_a_mixed_batch(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead, enable_prefix_caching=False)
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)


@each_mode
def test_with_chunked_prefill(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(
        reference, enable_prefix_caching=False, max_num_seqs=5, max_num_batched_tokens=6, **ahead
    )
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)


@each_mode
def test_with_prefix_hits(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead)
    check(reference, llm.generate(reference.prompts, PARAMS, use_tqdm=False), llm)
    again = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, again, llm)
    for output in again:
        full_blocks = (len(output.prompt_token_ids) - 1) // BLOCK_SIZE
        assert output.metrics.num_cached_tokens == full_blocks * BLOCK_SIZE


@each_mode
def test_under_preemption(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(reference, **ahead, num_gpu_blocks_override=1 + 40 // BLOCK_SIZE)
    outputs = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("reference", ["llama", "mistral-sliding-window"], indirect=True)
def test_with_swap_space(reference: Reference, ahead: dict[str, bool]) -> None:
    llm = make_llm(
        reference,
        num_gpu_blocks_override=1 + 40 // BLOCK_SIZE,
        swap_space=2**-6,
        enable_prefix_caching=False,
        **ahead,
    )
    outputs = llm.generate(reference.prompts, PARAMS, use_tqdm=False)
    check(reference, outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    host_pool = llm._core.scheduler.kv_cache.host_pool
    assert host_pool.num_free == host_pool.num_blocks
    # All tokens are computed but the last of each, and none twice. One step ahead, the end of a
    # sequence may be noticed when it has a place in another step.
    num_tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    num_ended = sum(token_ids[-1] == EOS for token_ids in reference.token_ids)
    num_computed = llm._core.take_stats().histograms["iteration_tokens_total"].sum
    assert num_tokens <= num_computed <= num_tokens + num_ended * ahead["async_scheduling"]
