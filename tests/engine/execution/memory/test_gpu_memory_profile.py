"""The memory profile of a GPU, on a simulated device that only counts bytes."""

from __future__ import annotations

import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.errors import InsufficientMemoryError
from engine.execution.devices import ResolvedConfig, resolve
from engine.execution.memory.gpu_memory_profile import (
    MemoryProfile,
    memory_before_loading,
    profile_memory,
)
from engine.execution.memory.kv_cache_plan import (
    require_room_for_weights,
)
from engine.execution.memory.step_memory import with_memory
from tests.factories.errors import refuses
from tests.factories.sampling import EMPTY
from tests.factories.simulated_gpu import Gpu

CUDA = torch.device("cuda")
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def config(**settings: object) -> ResolvedConfig:
    return resolve(EngineConfig.parse(settings), torch.device("cpu"))


def test_the_profile_holds_the_peak_and_the_graphs_and_not_what_loading_took(gpu: Gpu) -> None:
    gpu.allocate(2 * GIB)  # somebody's else in this process
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.allocate(30 * GIB)  # of which a part only while it is loaded
    gpu.release(14 * GIB)

    def run() -> None:
        gpu.libraries += GIB // 2
        gpu.allocate(3 * GIB)
        gpu.release(2 * GIB)
        gpu.allocate(GIB)
        gpu.release(GIB)

    def capture() -> float:
        gpu.allocate(GIB)  # their pool
        gpu.libraries += GIB // 4  # of the driver
        return 3.0

    found = profile_memory(config(), before, run, capture, CUDA)
    assert found == MemoryProfile(
        total=80 * GIB,
        weights=16 * GIB,
        activations=3 * GIB,
        graphs=7 * GIB // 4,
        libraries=GIB // 2,
        free=(80 - 1 - 2 - 16 - 3 - 1) * GIB - 5 * GIB // 4,
    )
    assert found.summary == (
        "the model takes 16.00 GiB, libraries 0.50 GiB, CUDA graphs 1.75 GiB and the largest step "
        "3.00 GiB of 80.00 GiB"
    )


def test_what_segments_hold_unused_is_lost_to_the_cache(gpu: Gpu) -> None:
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.unused = GIB
    gpu.allocate(10 * GIB)

    def run() -> None:
        gpu.unused += 2 * GIB
        gpu.allocate(3 * GIB)
        gpu.release(3 * GIB)
        gpu.unused -= 2 * GIB

    found = profile_memory(config(), before, run, None, CUDA)
    assert (found.weights, found.activations, found.graphs) == (11 * GIB, 5 * GIB, 0)
    assert found.free == (80 - 1 - 11 - 5) * GIB


def test_what_other_processes_do_meanwhile(gpu: Gpu) -> None:
    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.others = 0
    freed = profile_memory(config(), before, lambda: None, None, CUDA)
    assert (freed.libraries, freed.free) == (0, 80 * GIB)
    gpu.others = 50 * GIB
    taken = profile_memory(config(), before, lambda: None, None, CUDA)
    assert taken.free == 30 * GIB


@pytest.mark.parametrize("in_step", [True, False])
def test_a_step_that_finds_no_memory_says_which_setting_to_lower(gpu: Gpu, in_step: bool) -> None:
    def run() -> None:
        if in_step:
            with_memory(EMPTY, CUDA, lambda: gpu.allocate(20 * GIB))
        gpu.allocate(20 * GIB)

    before = memory_before_loading(config(), CUDA)
    assert before is not None
    gpu.allocate(60 * GIB)
    settings = config(max_num_batched_tokens=4096)
    with pytest.raises(
        InsufficientMemoryError,
        match=r"^max_num_batched_tokens: a step of 4096 tokens does not fit into the 19\.00 GiB of "
        r"memory free on cuda beside 60\.00 GiB of weights; lower max_num_batched_tokens or max_nu",
    ):
        profile_memory(settings, before, run, None, CUDA)


def test_a_share_that_others_hold_is_refused_before_anything_is_loaded(gpu: Gpu) -> None:
    gpu.others = 20 * GIB
    with pytest.raises(
        InsufficientMemoryError,
        match=r"^gpu_memory_utilization: 0\.9 of 80\.00 GiB is 72\.00 GiB, but only "
        r"60\.00 GiB of memory is free on cuda; end other programs on it, or .* to at most 0\.75$",
    ):
        memory_before_loading(config(), CUDA)
    assert memory_before_loading(config(gpu_memory_utilization=0.75), CUDA) is not None
    # With these, the share does not matter.
    assert memory_before_loading(config(kv_cache_memory_bytes=GIB), CUDA) is not None
    assert memory_before_loading(config(num_gpu_blocks_override=9), CUDA) is not None


def test_what_an_earlier_engine_has_given_back_is_free(gpu: Gpu) -> None:
    gpu.allocate(60 * GIB)
    gpu.release(60 * GIB)  # torch's allocator keeps it
    assert memory_before_loading(config(), CUDA) is not None


def test_weights_that_exceed_the_share_are_refused_before_they_are_loaded(gpu: Gpu) -> None:
    require_room_for_weights(71 * GIB, CUDA, config())
    with refuses("insufficient_memory", "model", match=r"the weights take 72\.00 GiB"):
        require_room_for_weights(72 * GIB, CUDA, config())
    require_room_for_weights(79 * GIB, CUDA, config(num_gpu_blocks_override=9))
    with refuses("insufficient_memory", "model", match=r"the weights need 79\.50 GiB, but on"):
        require_room_for_weights(159 * GIB // 2, CUDA, config(num_gpu_blocks_override=9))


def test_a_cpu_is_not_measured() -> None:
    assert memory_before_loading(config(), torch.device("cpu")) is None
