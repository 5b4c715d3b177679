"""Models whose layers keep states answer alike whatever is cached, cut, preempted or shared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, RequestOutput, SamplingParams
from engine.models.registry import read_model_spec
from engine.models.spec import MoE
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.forms import runs_panels
from tests.factories.greedy import Answer, GreedyReference, check_answer, check_blocks
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

VOCAB = 400
MAX_MODEL_LEN = 400
MAX_TOKENS = 70  # beyond a place for a checkpoint
SYSTEM = 131  # tokens that all long prompts have in common
INTERVAL = 64
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, logprobs=2, ignore_eos=True)

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Hybrid:
    """A random model, prompts, and transformers' answers to some of them alone."""

    path: Path
    prompts: list[list[int]]
    answers: list[Answer]

    def llm(self, **settings: Any) -> LLM:
        fields = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8}
        return LLM(str(self.path), **{**fields, **settings})

    def check(self, outputs: Sequence[RequestOutput], llm: LLM) -> None:
        for output, answer in zip(outputs, self.answers, strict=True):
            check_answer(output, answer)
        check_blocks(llm)

    def ask(self, llm: LLM, params: SamplingParams = GREEDY) -> list[RequestOutput]:
        return llm.generate(self.prompts, params, use_tqdm=False)


@pytest.fixture(
    scope="module",
    params=[
        "lfm2",
        "qwen3.5",
        pytest.param("lfm2-moe", marks=pytest.mark.large),
        pytest.param("qwen3.5-moe", marks=pytest.mark.large),
    ],
)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    architecture, fields = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    fields = {**fields, "max_position_embeddings": MAX_MODEL_LEN}
    model = write_checkpoint(path, architecture, vocab_size=VOCAB, eos_token_id=0, **fields)
    save_tokenizer(byte_level_tokenizer(), path)
    draw = random.Random(0)
    system = draw.choices(range(3, VOCAB), k=SYSTEM)
    reference = GreedyReference(model)
    drawn = [
        reference.draw(lambda own=own: system + draw.choices(range(3, VOCAB), k=own), MAX_TOKENS)
        for own in (1, 20, 69, 140)
    ]
    return Hybrid(path, [prompt for prompt, _ in drawn], [answer for _, answer in drawn])


@pytest.fixture(params=[False, True], ids=["step-by-step", "one-step-ahead"])
def ahead(request: pytest.FixtureRequest) -> dict[str, bool]:
    return {"async_scheduling": request.param}


def cached(outputs: Sequence[RequestOutput]) -> list[int]:
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("budget", [16, 64, 2048])
def test_hits_give_what_the_whole_prompt_gives(
    hybrid: Hybrid, ahead: dict[str, bool], budget: int
) -> None:
    """Of prompts that come together, of the same again, and of the next turns."""
    llm = hybrid.llm(max_num_batched_tokens=budget, **ahead)
    first = hybrid.ask(llm)
    hybrid.check(first, llm)
    # All have the system prompt in common; one of them computes it.
    assert sorted(cached(first)) == [0, 128, 128, 128]
    again = hybrid.ask(llm)
    hybrid.check(again, llm)
    for output, prompt in zip(again, hybrid.prompts, strict=True):
        assert output.num_cached_tokens >= (len(prompt) - 8) // INTERVAL * INTERVAL
    turns = [[*output.prompt_token_ids, *output.outputs[0].token_ids, 7, 8, 9] for output in again]
    asked = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
    short = llm.generate(turns, asked, use_tqdm=False)
    for output, prompt in zip(short, hybrid.prompts, strict=True):
        computed = len(prompt) + MAX_TOKENS - 1
        assert output.num_cached_tokens == computed // INTERVAL * INTERVAL
    cold = hybrid.llm(enable_prefix_caching=False).generate(turns, asked, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in short] == [
        each.outputs[0].token_ids for each in cold
    ]


def test_without_a_cache(hybrid: Hybrid, ahead: dict[str, bool]) -> None:
    llm = hybrid.llm(enable_prefix_caching=False, max_num_batched_tokens=50, **ahead)
    outputs = hybrid.ask(llm)
    hybrid.check(outputs, llm)
    assert cached(outputs) == [0] * 4


@pytest.mark.parametrize("swap_space", [0, 0.01])
def test_under_preemption(hybrid: Hybrid, ahead: dict[str, bool], swap_space: float) -> None:
    """A preempted sequence goes on from its newest checkpoint."""
    blocks = 1 + -(-MAX_MODEL_LEN // 16) + 8
    llm = hybrid.llm(num_gpu_blocks_override=blocks, swap_space=swap_space, **ahead)
    outputs = hybrid.ask(llm)
    hybrid.check(outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_samples_of_a_prompt_begin_with_one_state(hybrid: Hybrid, ahead: dict[str, bool]) -> None:
    params = SamplingParams(
        n=3, temperature=0.8, seed=1, max_tokens=MAX_TOKENS, logprobs=0, ignore_eos=True
    )
    llm = hybrid.llm(max_num_batched_tokens=100, **ahead)
    found = hybrid.ask(llm, params)
    check_blocks(llm)
    cold = hybrid.llm(enable_prefix_caching=False)
    for number, output in enumerate(found):
        assert len({tuple(each.token_ids) for each in output.outputs}) == 3
        (expected,) = cold.generate([hybrid.prompts[number]], params, use_tqdm=False)
        assert [each.token_ids for each in output.outputs] == [
            each.token_ids for each in expected.outputs
        ]


def test_more_conversations_than_checkpoints(hybrid: Hybrid) -> None:
    """What has been evicted is computed again."""
    llm = hybrid.llm(max_num_seqs=2, num_gpu_blocks_override=80)
    draw = random.Random(1)
    for _ in range(3):
        others = [draw.choices(range(3, VOCAB), k=200) for _ in range(6)]
        llm.generate(others, SamplingParams(max_tokens=3), use_tqdm=False)
        outputs = hybrid.ask(llm)
        hybrid.check(outputs, llm)


def bits(outputs: Sequence[RequestOutput]) -> list[list[tuple[list[int], list[float]]]]:
    """Return the tokens of all samples, and their log-probabilities, to the last bit."""
    return [
        [
            (each.token_ids, [found.logprob for at in each.logprobs or [] for found in at.values()])
            for each in output.outputs
        ]
        for output in outputs
    ]


@pytest.mark.skipif(
    not runs_panels(torch.float32),
    reason="this CPU has no products of ours, or the kernels are not built",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("samples", [1, 3])
def test_deterministic_answers_have_the_same_bits(hybrid: Hybrid, dtype: str, samples: int) -> None:
    if any(isinstance(layer.mlp, MoE) for layer in read_model_spec(hybrid.path).layers):
        pytest.skip("a mixture is not deterministic on a CPU")
    params = SamplingParams(
        n=samples, temperature=0.7, seed=3, max_tokens=MAX_TOKENS, logprobs=1, ignore_eos=True
    )
    make = partial(hybrid.llm, dtype=dtype, deterministic=True)
    expected = bits(hybrid.ask(make(enable_prefix_caching=False), params))
    blocks = 1 + -(-MAX_MODEL_LEN // 16) + 8
    for settings in (
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 64, "async_scheduling": True},
        {"max_num_batched_tokens": 200, "block_size": 32},
        {"num_gpu_blocks_override": blocks},
        {"num_gpu_blocks_override": blocks, "swap_space": 0.01, "async_scheduling": True},
        {"max_num_seqs": 1},
    ):
        llm = make(**settings)
        for turn in ("cold", "hit"):
            assert bits(hybrid.ask(llm, params)) == expected, (settings, turn)
