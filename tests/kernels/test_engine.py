"""The whole engine on our kernels: greedy tokens and log-probabilities equal transformers' in fp32.

Prompts in a mixed batch, in chunks, on shared prefixes and through preemption, with samples,
penalties and biases beside them. Much the same as `tests/engine/test_parity.py`, of which the
interpreter has time for little.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from transformers import PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from kernels import device
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer
from tests.kernels.support import DEVICE

VOCAB = 400
MAX_TOKENS = 4
LENGTHS = (1, 16, 26, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True)

# More layers only take longer: one of each kind is enough.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"num_hidden_layers": 1, "head_dim": 32}),
    "mistral-sliding-window": (
        "MistralForCausalLM",
        {"num_hidden_layers": 1, "head_dim": 32, "sliding_window": 9},
    ),
}


class Checkpoint:
    """A random model, prompts, and what transformers answers to them."""

    def __init__(self, path: Path, architecture: str, settings: dict[str, Any]) -> None:
        self.path = path
        model = write_checkpoint(path, architecture, vocab_size=VOCAB, **settings)
        byte_level_tokenizer().save_pretrained(path)
        rng = random.Random(0)
        common = [rng.randrange(3, VOCAB) for _ in range(20)]
        self.prompts = [
            (common + [rng.randrange(3, VOCAB) for _ in range(length)])[-length:]
            if length < 20
            else common + [rng.randrange(3, VOCAB) for _ in range(length - 20)]
            for length in LENGTHS
        ]
        self.answers = [_generate(model, prompt) for prompt in self.prompts]

    def llm(self, **settings: Any) -> LLM:
        defaults = {"block_size": 16, "max_model_len": 48, "max_num_seqs": 8}
        return LLM(str(self.path), dtype="float32", device=DEVICE.type, **{**defaults, **settings})

    def check(self, outputs: list[RequestOutput], llm: LLM) -> None:
        for output, (token_ids, logprobs) in zip(outputs, self.answers, strict=True):
            completion = output.outputs[0]
            assert completion.token_ids == token_ids
            assert completion.logprobs is not None
            for position, expected in zip(completion.logprobs, logprobs, strict=True):
                found = {token: entry.logprob for token, entry in position.items()}
                assert found == pytest.approx(expected, abs=1e-4)
        llm.check_integrity()
        assert llm.num_free_blocks == llm.num_blocks


@torch.inference_mode()
def _generate(
    model: PreTrainedModel, prompt: list[int]
) -> tuple[list[int], list[dict[int, float]]]:
    """Return the greedy continuation, and at each place the two most likely tokens."""
    ids, top = list(prompt), []
    for _ in range(MAX_TOKENS):
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].float(), dim=-1)
        values, indices = logprobs.topk(2)
        top.append(dict(zip(indices.tolist(), values.tolist(), strict=True)))
        ids.append(int(indices[0]))
    return ids[len(prompt) :], top


@pytest.fixture(autouse=True)
def small_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter stand in for few multiprocessors: it runs all programs in turn."""
    if device.INTERPRETED:
        limits = replace(device.HOPPER, num_sms=2)
        monkeypatch.setattr(device, "limits", lambda where: limits)


@pytest.fixture(scope="module", params=CASES)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), *CASES[request.param])


def test_in_a_mixed_batch(checkpoint: Checkpoint) -> None:
    llm = checkpoint.llm(enable_prefix_caching=False)
    checkpoint.check(llm.generate(checkpoint.prompts, GREEDY, use_tqdm=False), llm)


def test_with_chunked_prefill_and_prefix_hits(checkpoint: Checkpoint) -> None:
    llm = checkpoint.llm(max_num_batched_tokens=12)
    checkpoint.check(llm.generate(checkpoint.prompts, GREEDY, use_tqdm=False), llm)
    again = llm.generate(checkpoint.prompts, GREEDY, use_tqdm=False)
    checkpoint.check(again, llm)
    assert sum(output.metrics.num_cached_tokens for output in again) > 0


def test_under_preemption(checkpoint: Checkpoint) -> None:
    llm = checkpoint.llm(num_gpu_blocks_override=1 + 4)
    outputs = llm.generate(checkpoint.prompts, GREEDY, use_tqdm=False)
    checkpoint.check(outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_samples_do_not_depend_on_what_else_runs(checkpoint: Checkpoint) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=MAX_TOKENS, top_k=50, top_p=0.9),
        SamplingParams(temperature=1.3, seed=8, max_tokens=MAX_TOKENS, min_p=0.05, logprobs=1),
        SamplingParams(temperature=1, seed=9, max_tokens=MAX_TOKENS, n=2, presence_penalty=0.7),
        SamplingParams(temperature=1, seed=10, max_tokens=MAX_TOKENS, allowed_token_ids=(5, 6, 7)),
    ]
    llm = checkpoint.llm()
    together = llm.generate(checkpoint.prompts, params, use_tqdm=False)
    for prompt, param, output in zip(checkpoint.prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], param, use_tqdm=False)
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in output.outputs]
    assert set(together[3].outputs[0].token_ids) <= {5, 6, 7}
