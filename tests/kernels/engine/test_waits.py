"""The host does not synchronise between the launch of a step and reading its tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pydantic", reason="the engine is not installed here")
pytest.importorskip("transformers", reason="the engine is not installed here")

from engine import SamplingParams
from engine.core.schedule import SamplingBatch, SchedulerOutput
from engine.execution.model_runner import ModelRunner
from engine.execution.pending_step import PendingStep
from kernels import device
from tests.factories.greedy import GreedyCheckpoint
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.kernels.no_waiting import no_waiting
from tests.kernels.support import DEVICE

pytestmark = pytest.mark.usefixtures("small_gpu")

# A prompt is admitted with room for the next block of all that run: longer outputs are preempted.
MAX_TOKENS = 20
SETTINGS: dict[str, Any] = {
    "block_size": 16,
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 8,
    "num_gpu_blocks_override": 1 + 4,
    "swap_space": 2**-6,
    "enable_prefix_caching": False,
    "async_scheduling": True,
}
PARAMS = (
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2, "repetition_penalty": 1.2},
    {"temperature": 1.0, "n": 2, "top_p": 0.9, "seed": 1, "presence_penalty": 0.5},
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> GreedyCheckpoint:
    return GreedyCheckpoint(
        tmp_path_factory.mktemp("llama"),
        "LlamaForCausalLM",
        lengths=(7, 15, 14),
        max_tokens=1,
        num_hidden_layers=1,
        head_dim=32,
    )


def kinds(schedule: SchedulerOutput) -> set[str]:
    found = {name for name in ("swap_out", "copies", "swap_in") if len(getattr(schedule, name))}
    if schedule.num_decodes == schedule.num_rows:
        return found | {"decode"}
    return found | {"mixed" if schedule.num_decodes else "prefill"}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "enforce_eager",
    [pytest.param(True, marks=pytest.mark.large, id="eager"), pytest.param(False, id="captured")],
)
def test_no_step_waits(
    checkpoint: GreedyCheckpoint, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, sample, seen = ModelRunner.forward, ModelRunner.sample, set[str]()

    def watched_forward(runner: ModelRunner, schedule: SchedulerOutput) -> None:
        seen.update(kinds(schedule))
        with no_waiting():
            forward(runner, schedule)

    def watched_sample(runner: ModelRunner, sampling: SamplingBatch) -> PendingStep:
        with no_waiting():
            return sample(runner, sampling)

    llm = checkpoint.llm(DEVICE, **SETTINGS, enforce_eager=enforce_eager)
    if device.INTERPRETED and not enforce_eager:
        llm._core._runner.capture_graphs(ReplayingCapturer(), lambda done, total: None)
    params = [
        SamplingParams.parse({"max_tokens": MAX_TOKENS, "ignore_eos": True, **p}) for p in PARAMS
    ]
    if not device.INTERPRETED:  # compile and allocate everything first
        llm.generate(checkpoint.prompts, params, use_tqdm=False)
    monkeypatch.setattr(ModelRunner, "forward", watched_forward)
    monkeypatch.setattr(ModelRunner, "sample", watched_sample)
    llm.generate(checkpoint.prompts, params, use_tqdm=False)
    assert seen == {"decode", "mixed", "prefill", "swap_out", "swap_in", "copies"}
