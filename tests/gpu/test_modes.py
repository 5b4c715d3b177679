"""CUDA graphs, running a step ahead and swapping do not change any output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine import RequestOutput, SamplingParams
from tests.factories.greedy import GreedyCheckpoint, check_blocks

PLAIN = {"enforce_eager": True, "async_scheduling": False}
MODES: dict[str, dict[str, Any]] = {
    "graphs and ahead": {"enforce_eager": False, "async_scheduling": True},
    "graphs": {"enforce_eager": False, "async_scheduling": False},
    "ahead": {"enforce_eager": True, "async_scheduling": True},
    "graphs and ahead, with swaps": {
        "enforce_eager": False,
        "async_scheduling": True,
        "swap_space": 2**-4,
    },
}
# Chunks and decode rows share steps; few blocks, so that some sequences are preempted.
ROOMY = {"block_size": 16, "max_model_len": 192, "max_num_seqs": 16, "max_num_batched_tokens": 96}
TIGHT = {**ROOMY, "num_gpu_blocks_override": 1 + 24}

MAX_TOKENS = 40
LENGTHS = tuple(range(3, 90, 5))
SAMPLING = (
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 7},
    {"temperature": 0, "stop_token_ids": tuple(range(100, 200))},  # ends while a step is ahead
    {"temperature": 1.3, "min_p": 0.02, "seed": 8, "min_tokens": 5, "stop_token_ids": (5, 6, 7)},
    {"temperature": 1.0, "n": 3, "presence_penalty": 0.7, "frequency_penalty": 0.3, "seed": 9},
    {"temperature": 0, "repetition_penalty": 1.3, "logit_bias": {11: 4.0}, "max_tokens": 1},
    {"temperature": 1.0, "seed": 10, "allowed_token_ids": (5, 6, 7, 8), "max_tokens": 17},
    {"temperature": 0, "bad_words": ["e", "the"], "stop": ["a", "b", "c"]},
)
# Nothing but draws: head, draw and scatter are in graphs too.
DRAWS = (
    {"temperature": 0},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 7},
    {"temperature": 0, "stop_token_ids": tuple(range(100, 200))},
    {"temperature": 1.3, "min_p": 0.02, "seed": 8},
    {"temperature": 1.0, "n": 3, "seed": 9},
    {"temperature": 0.8, "seed": 10, "max_tokens": 17},
)

Found = list[list[tuple[list[int], str, object]]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("qwen2"),
        "Qwen2ForCausalLM",
        lengths=LENGTHS,
        max_tokens=1,
        hidden_size=128,
        head_dim=64,
        num_hidden_layers=2,
        max_position_embeddings=256,
    )


@dataclass(frozen=True)
class Load:
    """Memory of the engine, and what the requests ask for in turn."""

    settings: dict[str, Any]
    sampling: tuple[dict[str, Any], ...]


LOADS = {
    "roomy": Load(ROOMY, SAMPLING),
    "tight": Load(TIGHT, SAMPLING),
    "draws": Load(ROOMY, DRAWS),
    "draws, tight": Load(TIGHT, DRAWS),
}


@pytest.fixture(scope="module", params=LOADS.values(), ids=LOADS.keys())
def load(request: pytest.FixtureRequest) -> Load:
    load: Load = request.param
    return load


@pytest.fixture(scope="module")
def expected(checkpoint: GreedyCheckpoint, load: Load, device: torch.device) -> Found:
    found = answers(checkpoint, device, load, PLAIN)
    reasons = [reason for outputs in found for _, reason, _ in outputs]
    assert {"stop", "length"} == set(reasons), "the requests do not do what they are for"
    return found


@pytest.mark.parametrize("mode", MODES)
def test_answers_do_not_depend_on(
    mode: str,
    checkpoint: GreedyCheckpoint,
    load: Load,
    device: torch.device,
    expected: Found,
) -> None:
    assert answers(checkpoint, device, load, MODES[mode]) == expected


def answers(
    checkpoint: GreedyCheckpoint, device: torch.device, load: Load, mode: dict[str, Any]
) -> Found:
    """Return tokens, finish reason and stop reason of each sequence of each request."""
    llm = checkpoint.llm(device, **load.settings, **mode)
    sampling = load.sampling
    params = [
        SamplingParams.parse(
            {"max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling[i % len(sampling)]}
        )
        for i in range(len(checkpoint.prompts))
    ]
    outputs = llm.generate(checkpoint.prompts, params, use_tqdm=False)
    check_blocks(llm)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert bool(preemptions) == ("num_gpu_blocks_override" in load.settings)
    return [_sequences(output) for output in outputs]


def _sequences(output: RequestOutput) -> list[tuple[list[int], str, object]]:
    return [(each.token_ids, each.finish_reason, each.stop_reason) for each in output.outputs]
