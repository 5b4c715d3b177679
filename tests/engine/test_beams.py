"""Beam searches find the tokens and scores of transformers, in whatever company they run."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from engine import LLM, RequestOutput, SamplingParams
from engine.demo import CHECKPOINT_DIR
from engine.errors import RequestError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES
from tests.factories.tokenizers import byte_level_tokenizer

VOCAB = 400
STOPS = list(range(0, VOCAB, 7))  # so that beams end at different lengths

# What the request says; stop tokens, lengths and prompts vary.
RULES: list[dict[str, Any]] = [
    {"beam_width": 2, "n": 1},
    {"beam_width": 3, "n": 3, "length_penalty": 2.0},
    {"beam_width": 4, "n": 2, "early_stopping": True},
    {"beam_width": 6, "n": 6, "early_stopping": "never"},
    {"beam_width": 4, "n": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"beam_width": 4, "n": 4, "length_penalty": 0.0, "ignore_eos": True, "stop_token_ids": []},
    {"beam_width": 5, "n": 5, "min_tokens": 4},
    {"beam_width": 4, "n": 4, "repetition_penalty": 1.7},
    {"beam_width": 4, "n": 4, "logit_bias": {7: 6.0, 50: -3.0}},
    {"beam_width": 3, "n": 3, "allowed_token_ids": [3, 7, 8, 50, 60, 300]},
]
MODES: dict[str, dict[str, Any]] = {
    "whole": {"max_num_seqs": 32},
    "chunked": {"max_num_seqs": 6, "max_num_batched_tokens": 7},
    "fewer slots than beams": {"max_num_seqs": 2},
    "without a prefix cache": {"enable_prefix_caching": False},
    "preempted": {"num_gpu_blocks_override": 1 + 14, "max_num_batched_tokens": 12},
    "swapped": {
        "num_gpu_blocks_override": 1 + 14,
        "max_num_batched_tokens": 12,
        "swap_space": 2**-6,
    },
}


@dataclass(frozen=True)
class Search:
    prompt: list[int]
    params: SamplingParams
    outputs: list[list[int]]
    scores: list[float]

    def check(self, found: RequestOutput) -> None:
        assert [each.token_ids for each in found.outputs] == self.outputs
        assert [each.index for each in found.outputs] == list(range(len(self.outputs)))
        for each, score in zip(found.outputs, self.scores, strict=True):
            assert each.cumulative_logprob is not None
            length = len(each.token_ids) ** self.params.length_penalty
            assert each.cumulative_logprob / length == pytest.approx(score, abs=2e-4)
            assert each.logprobs is not None
            own = [next(iter(token.values())).logprob for token in each.logprobs]
            assert len(own) == len(each.token_ids)
            assert sum(own) == pytest.approx(each.cumulative_logprob, abs=1e-4)
            is_over = each.token_ids[-1] in self.params.stop_token_ids
            assert each.finish_reason == ("stop" if is_over else "length")


def expected(model: PreTrainedModel, prompt: list[int], rules: Mapping[str, Any]) -> Search:
    """Search with transformers."""
    params = SamplingParams(
        **{"ignore_eos": True, "stop_token_ids": STOPS, "logprobs": 0, **rules}  # type: ignore[arg-type]
    )
    allowed = params.allowed_token_ids
    stops = list(params.stop_token_ids)
    found: Any = model.generate(
        torch.tensor([prompt]),
        GenerationConfig(
            num_beams=params.beam_width,
            num_return_sequences=params.n,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens,
            repetition_penalty=params.repetition_penalty,
            sequence_bias=[[[i], bias] for i, bias in (params.logit_bias or {}).items()] or None,
            eos_token_id=stops or None,
            pad_token_id=model.config.vocab_size,  # no token of an output
            return_dict_in_generate=True,
            output_scores=True,
        ),
        prefix_allowed_tokens_fn=None if allowed is None else lambda *_: list(allowed),
    )
    rows = found.sequences[:, len(prompt) :].tolist()
    outputs = [[i for i in row if i < model.config.vocab_size] for row in rows]
    return Search(prompt, params, outputs, found.sequences_scores.tolist())


@dataclass(frozen=True)
class Reference:
    checkpoint: Path
    searches: list[Search]

    def llm(self, **settings: Any) -> LLM:
        limits = {"max_model_len": 48, "max_num_seqs": 8, "block_size": 4}
        return LLM(str(self.checkpoint), dtype="float32", **{**limits, **settings})


@pytest.fixture(
    scope="module",
    params=[
        name if name in ("llama", "lfm2") else pytest.param(name, marks=pytest.mark.large)
        for name in ("llama", "qwen3", "lfm2", "qwen3.5")
    ],
)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    path = tmp_path_factory.mktemp(request.param)
    architecture, fields = FAMILIES[request.param]
    model = write_checkpoint(path, architecture, vocab_size=VOCAB, eos_token_id=0, **fields)
    byte_level_tokenizer().save_pretrained(path)
    draw = random.Random(0)
    common = draw.choices(range(1, VOCAB), k=12)
    searches = []
    for index, rules in enumerate(RULES):
        rest = draw.choices(range(1, VOCAB), k=draw.randint(1, 9))
        prompt = (common if index % 2 else []) + rest
        searches.append(expected(model, prompt, {"max_tokens": draw.randint(6, 16), **rules}))
    return Reference(path, searches)


@pytest.mark.slow
@pytest.mark.usefixtures("checkpoints_at_each_block")
@pytest.mark.parametrize(
    ("mode", "ahead"),
    [
        pytest.param(mode, ahead, marks=() if ahead == (index % 2 == 0) else pytest.mark.large)
        for index, mode in enumerate(MODES)
        for ahead in (False, True)
    ],
)
def test_they_are_those_of_transformers(reference: Reference, mode: str, ahead: bool) -> None:
    llm = reference.llm(async_scheduling=ahead, **MODES[mode])
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    others = [search.prompt[::-1] for search in reference.searches]
    alone = [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in others]
    llm.check_integrity()
    for _ in range(1 + (mode == "whole")):  # then with all prompts in the prefix cache
        found = llm.generate(
            [each for s, other in zip(reference.searches, others, strict=True)
             for each in (s.prompt, other)],
            [each for s in reference.searches for each in (s.params, greedy)],
            use_tqdm=False,
        )  # fmt: skip
        for search, output in zip(reference.searches, found[::2], strict=True):
            search.check(output)
        for one, output in zip(alone, found[1::2], strict=True):
            assert one.outputs[0].token_ids == output.outputs[0].token_ids
        preempted = any(each.metrics.num_preemptions for each in found)
        assert preempted or mode not in ("preempted", "swapped")
        llm.check_integrity()
        assert llm.num_free_blocks == llm.num_blocks


@pytest.mark.slow
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_they_are_on_the_bundled_checkpoint(bundled: LLM, early_stopping: bool | str) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32)
    (greedy,) = bundled.chat(
        [{"role": "user", "content": "What are the colours of the rainbow?"}],
        SamplingParams(temperature=0, max_tokens=4),
        use_tqdm=False,
    )
    stops = model.generation_config.eos_token_id
    search = expected(
        model,
        greedy.prompt_token_ids,
        {
            "beam_width": 4,
            "n": 3,
            "max_tokens": 24,
            "early_stopping": early_stopping,
            "stop_token_ids": stops if isinstance(stops, list) else [stops],
        },
    )
    search.check(bundled.generate(search.prompt, search.params, use_tqdm=False)[0])


@pytest.fixture(scope="module")
def bundled() -> LLM:
    return LLM(dtype="float32", max_model_len=128, max_num_seqs=8)


def test_prompt_logprobs_come_with_the_first_beam(bundled: LLM) -> None:
    params = SamplingParams(beam_width=3, n=2, max_tokens=4, prompt_logprobs=1)
    (found,) = bundled.generate("The capital of Italy is", params, use_tqdm=False)
    alone = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=1)
    (scored,) = bundled.generate("The capital of Italy is", alone, use_tqdm=False)
    assert found.prompt_logprobs == scored.prompt_logprobs


def test_more_outputs_than_there_are_is_an_error_of_the_request(bundled: LLM) -> None:
    params = SamplingParams(
        beam_width=4, n=4, max_tokens=3, ignore_eos=True, allowed_token_ids=(40,)
    )
    with pytest.raises(RequestError, match="beam_width: only 1 different outputs are possible"):
        bundled.generate("a", params, use_tqdm=False)
    one = params.model_copy(update={"n": 1})
    assert bundled.generate("a", one, use_tqdm=False)[0].outputs[0].token_ids == [40] * 3
    bundled.check_integrity()


def test_the_best_of_several_samples_are_those_with_the_highest_mean(bundled: LLM) -> None:
    sampled = SamplingParams(n=5, seed=3, temperature=1.5, max_tokens=9, logprobs=0)
    best = sampled.model_copy(update={"n": 2, "best_of": 5})
    unasked = best.model_copy(update={"logprobs": None, "prompt_logprobs": 0})
    five, two, plain = bundled.generate(["Tell me"] * 3, [sampled, best, unasked], use_tqdm=False)

    def mean(index: int) -> float:
        total = five.outputs[index].cumulative_logprob
        assert total is not None
        return total / len(five.outputs[index].token_ids)

    order = sorted(range(5), key=mean, reverse=True)[:2]
    tokens = [five.outputs[index].token_ids for index in order]
    assert [each.token_ids for each in two.outputs] == tokens
    assert [each.token_ids for each in plain.outputs] == tokens
    assert [each.index for each in two.outputs] == [0, 1]
    assert {each.cumulative_logprob for each in plain.outputs} == {None}
    assert plain.prompt_logprobs is not None
    assert bundled.num_free_blocks == bundled.num_blocks
