"""A step that finds no memory on the device ends its own requests, and nobody else's."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.core.engine_core import EngineCore
from engine.core.schedule import SchedulerOutput
from engine.protocol.messages import AddRequest, RequestFailed
from engine.protocol.step_outputs import StepOutputs
from engine.protocol.token_ids import pack_token_ids
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

BLOCKS = 20
_uids = count()


class FailingDevice:
    """Runs the steps of `core` as a GPU does, and has no memory for some of them.

    Attributes:
        fails: step, counted from the last `start` -> where it fails.
        swaps: the steps since then that were to swap blocks out.
    """

    STAGES = ("before the moves", "after the forward pass", "after sampling")

    def __init__(self, core: EngineCore) -> None:
        runner: Any = core._runner
        self._forward = runner._run_forward
        runner._run_forward = self._run_forward
        runner._run_sample = partial(self._run_sample, runner._run_sample)
        runner._drafted.draw = partial(self._run_sample, runner._drafted.draw)
        self.start({})

    def start(self, fails: dict[int, str]) -> None:
        self.fails = fails
        self.swaps: list[int] = []
        self._step = -1

    def _run_forward(self, schedule: SchedulerOutput) -> object:
        self._step += 1
        if len(schedule.swap_out):
            self.swaps.append(self._step)
        self._fail("before the moves")
        results = self._forward(schedule)
        self._fail("after the forward pass")
        return results

    def _run_sample(self, sample: Callable[..., object], *args: object) -> object:
        results = sample(*args)
        self._fail("after sampling")
        return results

    def _fail(self, stage: str) -> None:
        if self.fails.get(self._step) == stage:
            exhaust(self._step)


def exhaust(kind: int) -> None:
    """Raise one of the errors that come where there is no memory; on the CPU, what comes there."""
    if kind % 4 == 0:
        torch.empty(2**55, dtype=torch.uint8)
    if kind % 4 == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nmore")
    if kind % 4 == 2:
        np.empty(2**55, dtype=np.uint8)
    call = "cublasLtMatmulAlgoGetHeuristic"
    raise RuntimeError(f"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `{call}`")


_NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
_MODES: dict[str, dict[str, Any]] = {
    "one-step-ahead": {"async_scheduling": True},
    "drafts": {"speculative_config": {**_NGRAM, "prompt_lookup_max": 2}},
}


@pytest.fixture(scope="module", params=[*_MODES])
def device(checkpoint: Path, request: pytest.FixtureRequest) -> tuple[EngineCore, FailingDevice]:
    fields = {
        "model": str(checkpoint),
        "dtype": "float32",
        **_MODES[request.param],
        "block_size": 4,
        "num_gpu_blocks_override": 1 + BLOCKS,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 20,
        "swap_space": 2**-9,
    }
    core = EngineCore(EngineConfig.parse(fields))
    return core, FailingDevice(core)


class Arrival(NamedTuple):
    """A request, and the step before which it comes."""

    step: int
    prompt: list[int]
    sampling: dict[str, Any]


class Found(NamedTuple):
    """What came of the requests, by their indices."""

    tokens: dict[tuple[int, int], list[int]]
    failed: dict[int, RequestFailed]
    num_preemptions: int
    num_hits: int


def serve(device: tuple[EngineCore, FailingDevice], arrivals: list[Arrival]) -> Found:
    core, _ = device
    requests: dict[int, int] = {}
    scheduler = core.scheduler
    before = scheduler.num_preemptions, scheduler.num_prefix_hits
    found = Found(defaultdict(list), {}, 0, 0)
    step = 0
    while step <= max(each.step for each in arrivals) or core.has_unfinished_requests():
        for request, arrival in enumerate(arrivals):
            if arrival.step == step:
                uid = next(_uids)
                requests[uid] = request
                params = {"ignore_eos": True, "seed": 0, **arrival.sampling}
                core.add_request(AddRequest(uid, pack_token_ids(arrival.prompt), params))
        outputs = core.step()
        for output in outputs.rows():
            request = requests[output.uid]
            assert request not in found.failed, "an output after the last one"
            found.tokens[request, output.index] += output.token_ids
        for failure in outputs.failures:
            assert found.failed.setdefault(requests[failure.uid], failure) is failure
        core.check_integrity()
        step += 1
    core.check_idle()
    return found._replace(
        num_preemptions=scheduler.num_preemptions - before[0],
        num_hits=scheduler.num_prefix_hits - before[1],
    )


_ARRIVALS = st.lists(
    st.builds(
        Arrival,
        step=st.integers(0, 12),
        # Of few beginnings, so that prefixes are shared: a block that was not computed is found.
        prompt=st.builds(
            lambda start, length: [(start * 7 + i) % 399 + 1 for i in range(length)],
            st.integers(0, 1),
            st.integers(1, 36),
        ),
        sampling=st.fixed_dictionaries(
            {"max_tokens": st.integers(1, 20)},
            optional={
                "temperature": st.sampled_from([0.0, 1.0]),
                "n": st.integers(1, 3),
                "repetition_penalty": st.just(1.3),
                "bad_words": st.just(("a",)),
            },
        ),
    ),
    min_size=1,
    max_size=7,
)
_FAILS = st.dictionaries(
    st.integers(0, 20), st.sampled_from(FailingDevice.STAGES), min_size=1, max_size=3
)


@settings(max_examples=25)
@given(arrivals=_ARRIVALS, fails=_FAILS)
def test_all_others_get_the_tokens_that_they_would_have_got(
    device: tuple[EngineCore, FailingDevice], arrivals: list[Arrival], fails: dict[int, str]
) -> None:
    device[1].start({})
    expected = serve(device, arrivals)
    assert not expected.failed
    device[1].start(fails)
    found = serve(device, arrivals)
    for (request, index), token_ids in expected.tokens.items():
        if request not in found.failed:
            assert found.tokens[request, index] == token_ids
        else:
            tokens = found.tokens[request, index]
            assert tokens == token_ids[: len(tokens)]
    # What is left in the prefix cache is right.
    device[1].start({})
    assert serve(device, arrivals).tokens == expected.tokens


def test_the_error_says_what_to_set(device: tuple[EngineCore, FailingDevice]) -> None:
    device[1].start({1: "after the forward pass"})
    sampling = {"max_tokens": 5, "temperature": 0}
    arrivals = [
        Arrival(0, [1, 2, 3], sampling),
        Arrival(1, [4] * 18, sampling),
        Arrival(3, [1, 2, 3], sampling),
    ]
    found = serve(device, arrivals)
    assert sorted(found.failed) == [0, 1]
    assert {each.error.code for each in found.failed.values()} == {"out_of_memory"}
    text = found.failed[0].error.message
    assert text.startswith("out of memory on cpu in a step of 2 sequences and 19 tokens (CUDA out")
    assert "more" not in text.partition("(")[2].partition(")")[0]
    for setting in ("kv_cache_memory_bytes", "max_num_batched_tokens", "max_num_seqs"):
        assert setting in text
    assert len(found.tokens[2, 0]) == 5


def test_swaps_that_were_not_carried_out_are_not_brought_back(
    device: tuple[EngineCore, FailingDevice],
) -> None:
    """Sequences are preempted; the step that was to swap them out fails."""
    arrivals = [Arrival(0, [i + 1] * 18, {"max_tokens": 40, "temperature": 0}) for i in range(4)]
    device[1].start({})
    expected = serve(device, arrivals)
    assert expected.num_preemptions > 0
    for step in list(device[1].swaps):
        device[1].start({step: "before the moves"})
        found = serve(device, arrivals)
        others = expected.tokens.keys() - {(request, 0) for request in found.failed}
        assert others, "the preempted ones do not take part in the step"
        for key in others:
            assert found.tokens[key] == expected.tokens[key]


@pytest.mark.parametrize("stage", FailingDevice.STAGES[:2])
def test_blocks_that_were_not_computed_are_not_found(
    device: tuple[EngineCore, FailingDevice], stage: str
) -> None:
    prompt = [5, 6, 7, 8] * 4 + [FailingDevice.STAGES.index(stage) + 9]
    again = [Arrival(0, prompt, {"max_tokens": 8, "temperature": 0})]
    device[1].start({0: stage})
    assert serve(device, again).failed
    device[1].start({})
    first, second = serve(device, again), serve(device, again)
    assert first.num_hits == 0
    assert second.num_hits == 16
    assert first.tokens == second.tokens


def test_a_process_at_its_limit_goes_on(tmp_path: Path) -> None:
    """The system refuses memory for the activations of a long prompt."""
    shape = {"intermediate_size": 16384, "max_position_embeddings": 4096}
    write_checkpoint(tmp_path, vocab_size=400, eos_token_id=0, **shape)
    save_tokenizer(byte_level_tokenizer(), tmp_path)
    fields = {"model": str(tmp_path), "dtype": "float32", "max_num_batched_tokens": 4096}
    core = EngineCore(EngineConfig.parse({**fields, "kv_cache_memory_bytes": 2**24}))

    def ends(uid: int, length: int) -> StepOutputs:
        params = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
        core.add_request(AddRequest(uid, pack_token_ids([5] * length), params))
        outputs = []
        while core.has_unfinished_requests():
            outputs.append(core.step())
        core.check_idle()
        return StepOutputs.concatenated(outputs)

    before = ends(0, 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**27, hard))
    try:
        (failure,) = ends(1, 4000).failures
        during = ends(2, 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "allocate memory" in failure.error.message
    assert "max_num_batched_tokens" in failure.error.message
    assert not ends(3, 4000).failures
    assert [row.token_ids for row in before.rows()] == [row.token_ids for row in during.rows()]
