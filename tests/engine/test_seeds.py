"""A seed's draws do not depend on the batch, on other settings, or on the engine's restart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine import LLM, SamplingParams

PROMPTS = [[5, 6, 7], [9] * 20, [11, 12], [5, 6, 7], [30, 31, 32, 33]]
FIELDS: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2**64 - 1, "top_p": 0.9, "temperature": 1.5},
    {"seed": 3, "typical_p": 0.9, "presence_penalty": 1.0},
    {"seed": 3, "top_n_sigma": 2.0, "top_k": 50, "n": 3},
    {"seed": 5, "dry_multiplier": 2.0, "dry_allowed_length": 1, "min_p": 0.01},
]
ASKED = [SamplingParams.parse({"max_tokens": 24, "ignore_eos": True, **each}) for each in FIELDS]


def answers(llm: LLM, indices: list[int]) -> list[list[list[int]]]:
    results = llm.generate(
        [PROMPTS[i] for i in indices], [ASKED[i] for i in indices], use_tqdm=False
    )
    return [[list(output.token_ids) for output in result.outputs] for result in results]


@pytest.fixture(scope="module")
def together(checkpoint: Path) -> list[list[list[int]]]:
    """What one engine answers to all of them at once."""
    llm = LLM(str(checkpoint), dtype="float32", block_size=4, max_num_seqs=8)
    found = answers(llm, [*range(len(ASKED))])
    assert len({tuple(tokens) for each in found for tokens in each}) == 7, "all differ"
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 1, "block_size": 8},
        {"max_num_seqs": 3, "async_scheduling": True, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "async_scheduling": True},
        {"num_gpu_blocks_override": 26, "max_num_seqs": 8, "block_size": 4, "seed": 77},
    ],
    ids=str,
)
def test_another_engine_draws_the_same(
    checkpoint: Path, together: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    llm = LLM(str(checkpoint), dtype="float32", max_model_len=80, **settings)
    order = [3, 0, 4, 2, 1]
    assert answers(llm, order) == [together[i] for i in order]
    for i in (1, 4):
        assert answers(llm, [i]) == [together[i]], "alone"
