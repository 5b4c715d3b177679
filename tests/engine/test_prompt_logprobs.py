"""Log-probabilities of prompts are those of transformers, however the prompts are computed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import RequestError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.prompt_scores import PromptReference, ScoredPrompt, check_prompts
from tests.factories.tokenizers import byte_level_tokenizer

VOCAB = 400
BLOCK_SIZE = 4
NUM_TOP = 3
LENGTHS = (1, 2, 4, 5, 9, 16, 17, 23, 30)
PARAMS = SamplingParams(
    temperature=0, max_tokens=9, prompt_logprobs=NUM_TOP, logprobs=0, ignore_eos=True
)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral-sliding-window": ("MistralForCausalLM", {"sliding_window": 9}),
}
MODES: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"max_num_seqs": 4, "max_num_batched_tokens": 6},
    "few rows of logits": {"max_num_seqs": 3},
    "without a prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 1 + 10, "max_num_batched_tokens": 8},
    "swapped": {
        "num_gpu_blocks_override": 1 + 10,
        "max_num_batched_tokens": 8,
        "swap_space": 2**-6,
    },
}


@dataclass(frozen=True)
class Reference:
    checkpoint: Path
    prompts: list[ScoredPrompt]

    def llm(self, **settings: Any) -> LLM:
        limits = {"max_model_len": 40, "max_num_seqs": 8, "block_size": BLOCK_SIZE}
        return LLM(str(self.checkpoint), dtype="float32", **{**limits, **settings})

    @property
    def token_ids(self) -> list[list[int]]:
        return [prompt.token_ids for prompt in self.prompts]


@pytest.fixture(scope="module", params=CASES)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    architecture, settings = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(path, architecture, vocab_size=VOCAB, eos_token_id=0, **settings)
    byte_level_tokenizer().save_pretrained(path)
    draw, scores = random.Random(request.param), PromptReference(model)
    common = draw.choices(range(1, VOCAB), k=12)
    prompts = []
    for index, length in enumerate(LENGTHS):
        prefix = common[: length // 2] if index % 2 else []
        token_ids = prefix + draw.choices(range(1, VOCAB), k=length - len(prefix))
        prompts.append(scores.score(token_ids))
    return Reference(path, prompts)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True], ids=["step-by-step", "one-step-ahead"])
@pytest.mark.parametrize(
    ("reference", "mode"),
    [  # what the scheduler does to a prompt is the same for each family: one stands for all
        pytest.param(
            case, mode, marks=() if case == "llama" or mode == "chunked" else pytest.mark.large
        )
        for case in CASES
        for mode in MODES
    ],
    indirect=["reference"],
)
def test_they_are_those_of_transformers(reference: Reference, mode: str, ahead: bool) -> None:
    llm = reference.llm(async_scheduling=ahead, **MODES[mode])
    num_preemptions = 0
    for _ in range(2):  # the second time with all prompts in the prefix cache
        outputs = llm.generate(reference.token_ids, PARAMS, use_tqdm=False)
        check_prompts(outputs, reference.prompts, NUM_TOP)
        assert [output.metrics.num_cached_tokens for output in outputs] == [0] * len(outputs)
        num_preemptions += sum(output.metrics.num_preemptions for output in outputs)
    assert (num_preemptions > 0) == (mode in ("preempted", "swapped"))
    llm.check_integrity()
    assert llm.num_free_blocks == llm.num_blocks


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tmp_path_factory.mktemp("llama")
    write_checkpoint(path, vocab_size=VOCAB, eos_token_id=0)
    byte_level_tokenizer().save_pretrained(path)
    return LLM(str(path), dtype="float32", max_model_len=64, max_num_seqs=4, block_size=4)


def test_the_answer_is_the_same_with_them_and_without(llama: LLM) -> None:
    prompts = [list(range(1, 30)), list(range(1, 20))]
    plain = PARAMS.model_copy(update={"prompt_logprobs": None})
    with_them = llama.generate(prompts, PARAMS, use_tqdm=False)
    without = llama.generate(prompts, plain, use_tqdm=False)
    for found, expected in zip(with_them, without, strict=True):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert [each.prompt_logprobs for each in without] == [None, None]


def test_what_they_compute_is_a_prefix_for_others(llama: LLM) -> None:
    prompt = list(range(50, 80))
    plain = PARAMS.model_copy(update={"prompt_logprobs": None})
    llama.generate(prompt, PARAMS, use_tqdm=False)
    (output,) = llama.generate(prompt, plain, use_tqdm=False)
    assert output.metrics.num_cached_tokens == 28


def test_siblings_share_them(llama: LLM) -> None:
    prompt = list(range(100, 120))
    sampled = PARAMS.model_copy(update={"n": 3, "temperature": 1.0, "seed": 1})
    one, three = (llama.generate(prompt, params, use_tqdm=False)[0] for params in (PARAMS, sampled))
    assert len(three.outputs) == 3
    assert three.prompt_logprobs == one.prompt_logprobs


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_any_number_up_to_the_limit_is_reported(llama: LLM, num_top: int) -> None:
    params = [
        PARAMS.model_copy(update={"prompt_logprobs": number}) for number in (num_top, 2, None)
    ]
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    first, second, third = llama.generate(prompts, params, use_tqdm=False)
    assert first.prompt_logprobs is not None
    assert second.prompt_logprobs is not None
    assert third.prompt_logprobs is None
    assert {len(token or ()) - num_top for token in first.prompt_logprobs[1:]} <= {0, 1}
    assert {len(token or ()) for token in second.prompt_logprobs[1:]} <= {2, 3}


def test_a_prompt_can_be_scored_without_an_answer(llama: LLM) -> None:
    prompts = [list(range(1, length)) for length in (2, 12, 64)]
    scored = PARAMS.model_copy(update={"max_tokens": 0})
    expected = llama.generate(prompts, PARAMS.model_copy(update={"max_tokens": 1}), use_tqdm=False)
    llama._core.take_stats()
    found = llama.generate(prompts, scored, use_tqdm=False)
    stats = llama._core.take_stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (sum(map(len, prompts)), 0)
    assert "time_to_first_token_seconds" not in stats.histograms
    for output, answered in zip(found, expected, strict=True):
        (completion,) = output.outputs
        assert (completion.token_ids, completion.text, completion.logprobs) == ([], "", [])
        assert completion.finish_reason == "length"
        assert output.metrics.num_output_tokens == 0
        assert output.prompt_logprobs == answered.prompt_logprobs
    llama.check_integrity()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"prompt_logprobs": 21}, r"prompt_logprobs: must be at most .* 20 \(got 21\)"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: .*greater than or equal to 0"),
        ({"prompt_logprobs": "many"}, "prompt_logprobs: "),
        ({"max_tokens": 0}, "max_tokens: must be at least 1 without prompt_logprobs"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens: "),
        ({"max_tokens": 0, "min_tokens": 1, "prompt_logprobs": 0}, "min_tokens: "),
    ],
)
def test_wrong_values_are_refused_by_name(llama: LLM, fields: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        llama.generate("a", SamplingParams.parse(fields), use_tqdm=False)


def test_more_than_a_response_holds_are_refused(
    llama: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.core.request_factory.MAX_LOGPROBS_AT_ONCE", 40)
    llama.generate([1] * 10, PARAMS, use_tqdm=False)
    with pytest.raises(RequestError, match=r"prompt_logprobs: has 44 .* at most 40 are allowed"):
        llama.generate([1] * 11, PARAMS, use_tqdm=False)
