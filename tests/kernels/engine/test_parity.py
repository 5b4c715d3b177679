"""The whole engine on our kernels: greedy tokens and log-probabilities equal transformers' in fp32.

Mixed batches, chunked prefill, shared prefixes and preemption, with samples, penalties and biases.
A small version of `tests/engine/test_parity.py`, which would take the interpreter too long.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, SamplingParams
from kernels import device
from tests.factories.families import FAMILIES
from tests.factories.greedy import GreedyCheckpoint
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

MAX_TOKENS = 4


def _smaller(name: str, **settings: Any) -> tuple[str, dict[str, Any]]:
    architecture, fields = FAMILIES[name]
    return architecture, {**fields, "head_dim": 32, **settings}


# More layers only take longer: one of each kind is enough.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3ForCausalLM", {"num_hidden_layers": 1, "head_dim": 32}),
    "mistral-sliding-window": (
        "MistralForCausalLM",
        {"num_hidden_layers": 1, "head_dim": 32, "sliding_window": 9},
    ),
    # Queries scaled by their position; adjacent pairs and a softmax with a bias; sigmoids.
    "ministral3": _smaller("ministral3", num_hidden_layers=1),
    "ernie-moe": _smaller("ernie-moe", num_hidden_layers=2, moe_layer_start_index=1),
    "glm-moe": _smaller("glm-moe", num_hidden_layers=2),
    "lfm2": _smaller("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "qwen3.5": _smaller(
        "qwen3.5", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    ),
}
LARGE = [name for name in CASES if name != "qwen3"]


def make_llm(checkpoint: GreedyCheckpoint, **settings: Any) -> LLM:
    defaults = {"block_size": 16, "max_model_len": 48, "max_num_seqs": 8, "max_logprobs": 2}
    return checkpoint.llm(DEVICE, **{**defaults, **settings})


# What the others add is covered by the tests of kernels too.
@pytest.fixture(
    scope="module",
    params=["qwen3", *(pytest.param(name, marks=pytest.mark.large) for name in LARGE)],
)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> GreedyCheckpoint:
    architecture, settings = CASES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    return GreedyCheckpoint(
        path, architecture, lengths=(1, 16, 26, 33), max_tokens=MAX_TOKENS, **settings
    )


def test_in_a_mixed_batch(checkpoint: GreedyCheckpoint) -> None:
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)


def test_with_chunked_prefill_and_prefix_hits(checkpoint: GreedyCheckpoint) -> None:
    llm = make_llm(checkpoint, max_num_batched_tokens=12)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)
    again = llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False)
    checkpoint.check(again, llm)
    keeps_states = bool(llm._core._runner.model.spec.state_shapes)  # of which 64 tokens are a hit
    assert keeps_states or sum(output.metrics.num_cached_tokens for output in again) > 0


def test_under_preemption(tmp_path: Path) -> None:
    """Outputs outgrow the block that is reserved for them when a prompt is admitted."""
    architecture, settings = CASES["qwen3"]
    checkpoint = GreedyCheckpoint(
        tmp_path, architecture, lengths=(15, 14), max_tokens=20, **settings
    )
    llm = make_llm(checkpoint, num_gpu_blocks_override=1 + 4)
    outputs = llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False)
    checkpoint.check(outputs, llm)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_in_captured_steps(checkpoint: GreedyCheckpoint) -> None:
    """Decode and mixed steps, with padding, one step ahead of the host, as on a GPU.

    The profiling step before them, which only measures memory, has no side effects.
    """
    llm = make_llm(
        checkpoint,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        async_scheduling=True,
    )
    capturer = ReplayingCapturer()
    if device.INTERPRETED:
        llm._core._runner.warm_up()
        llm._core._runner.capture_graphs(capturer, lambda done, total: None)
    checkpoint.check(llm.generate(checkpoint.prompts, checkpoint.sampling, use_tqdm=False), llm)
    if device.INTERPRETED:
        # One graph of 64 tokens, then of 4, 2 and 1 rows: all four decode together at first.
        mixed, decode, *_ = capturer.num_replays
        assert (mixed, decode) == (2, MAX_TOKENS - 2)


def test_samples_do_not_depend_on_what_else_runs(checkpoint: GreedyCheckpoint) -> None:
    params = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=MAX_TOKENS, top_k=50, top_p=0.9),
        SamplingParams(temperature=1.3, seed=8, max_tokens=MAX_TOKENS, min_p=0.05, logprobs=1),
        SamplingParams(temperature=1, seed=9, max_tokens=MAX_TOKENS, n=2, presence_penalty=0.7),
        SamplingParams(temperature=1, seed=10, max_tokens=MAX_TOKENS, allowed_token_ids=(5, 6, 7)),
    ]
    llm = make_llm(checkpoint)
    together = llm.generate(checkpoint.prompts, params, use_tqdm=False)
    for prompt, param, output in zip(checkpoint.prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], param, use_tqdm=False)
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in output.outputs]
    assert set(together[3].outputs[0].token_ids) <= {5, 6, 7}
