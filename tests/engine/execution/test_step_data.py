"""A step is data: a runner in another process computes it from what comes through a pipe."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.schedule import NO_SAMPLING, SamplerOutput, SamplingBatch, SchedulerOutput
from engine.execution.loading import load_model
from engine.execution.model_runner import ModelRunner
from engine.execution.pending_step import Runner
from engine.models.registry import read_model_spec
from engine.protocol.messages import AddRequest
from engine.protocol.token_ids import pack_token_ids
from kernels.step.sampling_columns import ALLOWED, SKIPPED
from tests.factories.replayed_graphs import ReplayingCapturer
from tests.factories.thread_ranks import ThreadGroup, ThreadGroups

SETTINGS = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 26,
    "swap_space": 2**-12,
    "max_model_len": 64,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 24,
    "scheduling_policy": "priority",
}
SHARED = list(range(50, 90))
REQUESTS: list[tuple[list[int], dict[str, Any]]] = [
    (SHARED, {"temperature": 0, "logprobs": 2}),
    ([*SHARED, 7], {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 4}),
    ([1, 2, 3, 4, 5], {"n": 3, "seed": 5, "min_p": 0.02, "logprobs": 0}),
    ([9] * 9, {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4}),
    ([9] * 10, {"temperature": 2.0, "seed": 6, "frequency_penalty": 1.5, "logprobs": 3}),
    ([10, 9], {"temperature": 1.4, "seed": 12, "top_n_sigma": 1.5, "typical_p": 0.9}),
    ([5, 6, 7, 5, 6], {"seed": 13, "dry_multiplier": 9.0, "dry_allowed_length": 1, "top_k": 3}),
    ([11, 12], {"temperature": 1.5, "bad_words": ["a", "the", "b"], "seed": 7}),
    ([13, 14, 15], {"temperature": 0, "allowed_token_ids": [5, 6, 7, 300], "min_tokens": 6}),
    ([16], {"logit_bias": {30: 4.0, 31: 4.0, 32: -9.0}, "seed": 8}),
    ([17] * 6, {"min_tokens": 20, "stop_token_ids": list(range(100, 200)), "seed": 9}),
    ([19, 20], {"n": 4, "temperature": 3.0, "stop_token_ids": [*range(200, 216)], "seed": 11}),
    ([21], {"structured_outputs": {"regex": "[Tt]he quick brown fox[.!]"}}),
    ([18] * 30, {"min_tokens": 20, "stop_token_ids": [3, 4], "temperature": 3.0, "seed": 10}),
    (list(range(60, 90)), {"temperature": 0, "prompt_logprobs": 2}),
    ([22] * 5, {"allowed_token_ids": [22, 23], "temperature": 3.0, "seed": 14, "logprobs": 2}),
]


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 1}
MODES: dict[str, dict[str, Any]] = {
    "one-step-ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": NGRAM},
}


def run_steps(config: EngineConfig, checkpoint: Path, pipe: Connection) -> None:
    """Answer each (schedule, sampling batch) with its samples; end with the pipe."""
    model_spec = read_model_spec(checkpoint)
    runner = load_model(config, checkpoint, model_spec, list, lambda text: None).runner
    pipe.send("ready")
    try:
        while True:
            schedule, sampling = pipe.recv()
            runner.forward(schedule)
            pipe.send(runner.sample(sampling).wait())
    except EOFError:
        pass


@contextmanager
def other_process(config: EngineConfig, checkpoint: Path) -> Iterator[Connection]:
    """Yield the pipe to `run_steps` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=run_steps, args=(config, checkpoint, theirs))
    process.start()
    theirs.close()
    try:
        assert mine.recv() == "ready"
        yield mine
    finally:
        mine.close()
        process.join(20)
        process.kill()


class Recorder:
    """Passes steps on to `runner`, and keeps them and their samples."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.schedules: list[SchedulerOutput] = []
        self.batches: list[SamplingBatch] = []
        self.samples: list[SamplerOutput] = []

    def forward(self, schedule: SchedulerOutput) -> None:
        self.schedules.append(schedule)
        self._runner.forward(schedule)

    def sample(self, sampling: SamplingBatch) -> Any:
        self.batches.append(sampling)
        step = self._runner.sample(sampling)

        def wait() -> SamplerOutput:
            self.samples.append(step.wait())
            return self.samples[-1]

        return Waiting(wait)


class Waiting:
    """Samples that a function waits for."""

    def __init__(self, wait: Any) -> None:
        self.wait = wait


@pytest.fixture(scope="module", params=[*MODES])
def config(checkpoint: Path, request: pytest.FixtureRequest) -> EngineConfig:
    return EngineConfig.parse({"model": str(checkpoint), **SETTINGS, **MODES[request.param]})


@pytest.fixture(scope="module")
def steps(config: EngineConfig) -> Recorder:
    """The steps of an engine that serves all requests, which come one by one."""
    core = EngineCore(config)
    core._runner = recorder = Recorder(core._runner)
    left = list(enumerate(REQUESTS))
    while left or core.has_unfinished_requests():
        # The last one runs alone: there is room for drafts.
        if len(left) > 1 or (left and not core.has_unfinished_requests()):
            uid, (prompt, sampling) = left.pop(0)
            params = {"max_tokens": 24, "ignore_eos": True, **sampling}
            priority = -uid  # later ones run first, so that earlier ones are preempted
            core.add_request(AddRequest(uid, pack_token_ids(prompt), params, priority=priority))
        core.step()
    core.check_idle()
    return recorder


def test_another_process_gets_the_same_tokens(
    steps: Recorder, config: EngineConfig, checkpoint: Path
) -> None:
    with other_process(config, checkpoint) as pipe:
        for schedule, sampling, samples in zip(
            steps.schedules, steps.batches, steps.samples, strict=True
        ):
            pipe.send((schedule, sampling))
            assert_equal(pipe.recv(), samples)


@pytest.mark.parametrize(("num_ranks", "captures"), [(2, False), (2, True), (3, False)])
def test_ranks_get_the_same_tokens(
    steps: Recorder, config: EngineConfig, checkpoint: Path, num_ranks: int, captures: bool
) -> None:
    """Followers know the schedules alone: what is drawn, and from which logits, rank 0 shares.

    They run the same graphs, whatever they have measured themselves.
    """
    if captures and config.speculative_config is not None:
        pytest.skip("drafts are for CPUs, graphs for GPUs")

    # Ranks that share a KV head hold fewer blocks in the same memory.
    settings = config.model_copy(update={"swap_space": 2 * config.swap_space})

    def run(group: ThreadGroup) -> list[SamplerOutput]:
        spec = read_model_spec(checkpoint)
        runner = load_model(settings, checkpoint, spec, list, lambda text: None, group).runner
        assert isinstance(runner, ModelRunner)
        capturer = ReplayingCapturer()
        if captures:
            runner.capture_graphs(capturer, lambda done, total: None)
        found = []
        for schedule, sampling in zip(steps.schedules, steps.batches, strict=True):
            runner.forward(schedule)
            found.append(runner.sample(NO_SAMPLING if group.rank else sampling).wait())
        assert any(capturer.num_replays) == captures
        return found

    groups = ThreadGroups(num_ranks)
    num_threads = torch.get_num_threads()
    try:
        samples, *_ = groups.run(run)
    finally:
        torch.set_num_threads(num_threads)
    for found, expected in zip(samples, steps.samples, strict=True):
        assert_equal(found, expected)
    assert all(trace == groups.traces[0] for trace in groups.traces)


def assert_equal(found: SamplerOutput, expected: SamplerOutput) -> None:
    assert found.finish_reasons.tolist() == expected.finish_reasons.tolist()
    valid = expected.finish_reasons != SKIPPED
    assert found.token_ids[valid].tolist() == expected.token_ids[valid].tolist()
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        mine, theirs = found.logprobs, expected.logprobs
        assert mine.rows.tolist() == theirs.rows.tolist()
        for row, index in enumerate(mine.rows.tolist()):
            if valid[index]:
                assert mine.ranks[row] == theirs.ranks[row]
                assert mine.logprobs[row] == pytest.approx(theirs.logprobs[row], abs=1e-4)
                num_top = theirs.num_top[row]
                assert mine.num_top[row] == num_top
                ids = (found.top_token_ids[row, :num_top].tolist() for found in (mine, theirs))
                assert len({tuple(each) for each in ids}) == 1
    assert (found.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    if found.prompt_logprobs is not None and expected.prompt_logprobs is not None:
        for mine, theirs in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)
    for one, other in zip(found.drafted, expected.drafted, strict=True):
        assert_equal(one, other)


def test_these_steps_have_everything_in_them(steps: Recorder, config: EngineConfig) -> None:
    """What the test above relies on."""
    schedules, new_requests = steps.schedules, [s.new_requests for s in steps.schedules]
    assert any(len(s.swap_out) for s in schedules), "a preempted sequence is swapped out"
    assert any(len(s.swap_in) for s in schedules), "and comes back"
    assert any(len(s.copies) for s in schedules), "a shared block is copied"
    assert any(s.num_decodes not in (0, s.num_rows) for s in schedules), "mixed steps"
    assert any((~s.wants_token).any() for s in schedules), "chunks of prompts"
    resumed = [
        (a.num_prompt_tokens < np.diff(a.token_ids.start_loc)) & (a.num_computed_tokens > 0)
        for a in new_requests
    ]
    assert any(each.any() for each in resumed)
    hits = [
        (np.diff(a.token_ids.start_loc) > 40) & (a.num_computed_tokens == 40) for a in new_requests
    ]
    assert any(each.any() for each in hits), "a prefix is found in the cache"
    assert any(len(b.mask_rows) for b in steps.batches)
    assert any(b.adjustments is not None for b in steps.batches)
    assert any(s.forced is not None for s in schedules)
    assert any(s.scored is not None for s in schedules)
    assert any((a.features & ALLOWED).any() for a in new_requests)
    assert any(len(a.bias_values) for a in new_requests)
    assert any((a.frequency_penalty > 0).any() for a in new_requests)
    if config.speculative_config is None:
        assert any((s.finish_reasons == SKIPPED).any() for s in steps.samples), "one step ahead"
    else:
        assert any(s.drafts is not None and s.drafts.most > 1 for s in schedules)
        drafted = [each for samples in steps.samples for each in samples.drafted]
        assert any(s.logprobs for s in drafted), "some are drawn, with log-probabilities"
        assert any(
            s.drafts is not None and not x.drafted
            for s, x in zip(schedules, steps.samples, strict=True)
        )
    assert {s.logprobs.top_token_ids.shape[1] for s in steps.samples if s.logprobs} >= {0, 2, 3}


def test_a_step_holds_arrays_and_numbers_alone(steps: Recorder) -> None:
    for part in (*steps.schedules, *steps.batches, *steps.samples):
        assert foreign(part) == []


def foreign(value: object, path: str = "") -> list[str]:
    """Return where there is anything but arrays of numbers, numbers and None."""
    if is_dataclass(value):
        return [
            found
            for field in fields(value)
            for found in foreign(getattr(value, field.name), f"{path}.{field.name}")
        ]
    if isinstance(value, tuple):
        return [
            found for index, part in enumerate(value) for found in foreign(part, f"{path}[{index}]")
        ]
    if isinstance(value, np.ndarray):
        return [] if value.dtype.kind in "biuf" else [f"{path}: {value.dtype}"]
    return [] if value is None or isinstance(value, (bool, int, float)) else [f"{path}: {value!r}"]
