"""The deterministic mode of a GPU: the same bytes alone, in any company, chunk by chunk, in graphs.

A small version of `tests/engine/test_deterministic.py`, which would take the interpreter too long.
"""

from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import LLM, RequestOutput
from engine.layers.linear.batch_invariant import BatchInvariantLinear
from engine.layers.linear.linear import Linear
from kernels import device
from tests.factories.greedy import GreedyCheckpoint
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("model"),
        "Qwen3ForCausalLM",
        lengths=(1, 16, 26, 33),
        max_tokens=3,
        num_hidden_layers=1,
        head_dim=32,
    )


def make_llm(checkpoint: GreedyCheckpoint, **settings: Any) -> LLM:
    defaults = {
        "block_size": 16,
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_logprobs": 2,
        "deterministic": True,
    }
    return checkpoint.llm(DEVICE, **{**defaults, **settings})


def bits(outputs: list[RequestOutput]) -> list[Any]:
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def test_answers_do_not_depend_on_what_else_runs(checkpoint: GreedyCheckpoint) -> None:
    llm = make_llm(checkpoint, enable_prefix_caching=False)
    modules = list(llm._core._runner.model.modules())
    assert not any(isinstance(module, Linear) for module in modules)
    assert (
        sum(isinstance(module, BatchInvariantLinear) for module in modules) == 5
    )  # 4 and the head
    sampling = checkpoint.sampling
    alone = [llm.generate([p], sampling, use_tqdm=False)[0] for p in checkpoint.prompts]
    checkpoint.check(alone, llm)
    assert bits(llm.generate(checkpoint.prompts, sampling, use_tqdm=False)) == bits(alone)

    chunked = make_llm(checkpoint, max_num_batched_tokens=12, block_size=32)
    for _ in range(2):  # the second time with prefix hits
        found = chunked.generate(checkpoint.prompts, sampling, use_tqdm=False)
        assert bits(found) == bits(alone)

    captured = make_llm(checkpoint, max_num_batched_tokens=64, async_scheduling=True)
    capturer = ReplayingCapturer()
    if device.INTERPRETED:
        captured._core._runner.warm_up()
        captured._core._runner.capture_graphs(capturer, lambda done, total: None)
    found = captured.generate(checkpoint.prompts, sampling, use_tqdm=False)
    assert bits(found) == bits(alone)
    assert sum(capturer.num_replays) > 0 or not device.INTERPRETED
