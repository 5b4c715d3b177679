"""Warm-up runs all kernels that steps use, so that no request waits for compilation on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import SamplingParams
from kernels import device, paged_prefill, split_plan
from tests.factories.greedy import GreedyCheckpoint
from tests.kernels.support import DEVICE

MAX_TOKENS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("llama"),
        "LlamaForCausalLM",
        lengths=(130, *(2,) * 16, 33),
        max_tokens=MAX_TOKENS,
        num_hidden_layers=1,
        head_dim=32,
        max_position_embeddings=256,
    )


@pytest.mark.skipif(not device.INTERPRETED, reason="pretends to be another GPU")
def test_warm_up_compiles_every_tile_size(
    checkpoint: GreedyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(device.HOPPER, num_sms=2)
    monkeypatch.setattr(device, "limits", lambda where: limits)
    seen: set[tuple[Any, ...]] = set()
    for module in (paged_prefill, split_plan):
        monkeypatch.setattr(module, "settings", _recorded(module.settings, seen))

    llm = checkpoint.llm(
        DEVICE,
        dtype="float16",  # in float32 all prefill tiles are equal
        block_size=16,
        max_model_len=160,
        max_num_seqs=18,
        max_num_batched_tokens=160,
        enable_prefix_caching=False,
    )
    seen.clear()
    llm._core._runner.warm_up()
    warm = set(seen)
    seen.clear()
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    # First a long prompt alone, then many short ones with a long one.
    for prompts in (checkpoint.prompts[:1], checkpoint.prompts[1:]):
        llm.generate(prompts, params, use_tqdm=False)
    assert len(seen) == 4, "small and large tiles, few and many rows"
    assert seen == warm


def _recorded(
    settings: Callable[..., dict[str, int]], seen: set[tuple[Any, ...]]
) -> Callable[..., dict[str, int]]:
    def recorded(*args: Any) -> dict[str, int]:
        found = settings(*args)
        seen.add((settings.__module__, *found.items()))
        return found

    return recorded
