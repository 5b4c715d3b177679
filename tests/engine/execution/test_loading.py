"""The start of an engine on a GPU, on a simulated device and a model that only take memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.config.engine_config import EngineConfig
from engine.execution import devices, loading
from engine.execution.graphs.graph_sizes import GraphSizes
from engine.execution.loading import LoadedModel, load_model
from tests.factories.errors import refuses
from tests.factories.simulated_gpu import GIB, Gpu

MIB = 2**20
BLOCK = 16 * MIB
STEP = 3 * GIB
MODEL: Any = SimpleNamespace(
    num_ranks=1,
    kv_bytes_per_token=lambda dtype: BLOCK // 16,
    num_layers=4,
    attentions=(None,) * 4,
    state_shapes=(),
    sliding_windows=(None,) * 4,
    context_length=4096,
    dtype="bfloat16",
    architecture="Any",
    vocab_size=100,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
)


class Model:
    """Takes what a model, its largest step and its graphs do: a pool, and 7 MiB for each size."""

    graph_sizes = GraphSizes(list(range(1, 34)), list(range(64, 2112, 64)))

    def __init__(self, gpu: Gpu) -> None:
        gpu.allocate(16 * GIB)
        self._gpu = gpu
        self._cache = 0
        self._graphs = GraphSizes([], [])
        self.done: list[str] = []

    def allocate_kv_cache(self, num_blocks: int, num_states: int = 0) -> None:
        self._gpu.release(self._cache)
        self._cache = num_blocks * BLOCK
        self._gpu.allocate(self._cache)
        self.done.append("cache" if num_blocks > 1 else "block")

    def allocate_swap_space(self, num_bytes: int) -> int:
        return num_bytes // BLOCK

    def warm_up(self) -> None:
        if "warm-up" not in self.done:
            self._gpu.libraries += GIB
        self._gpu.allocate(STEP)
        self._gpu.release(STEP)
        self.done.append("warm-up")

    def capture_graphs(
        self, capturer: object, on_progress: Callable[[int, int], None], sizes: GraphSizes
    ) -> int:
        self._gpu.allocate(GIB)
        if not any("sizes" in done for done in self.done):
            self._gpu.libraries += GIB // 2
        self._gpu.libraries += 7 * MIB * sizes.num_steps
        self._graphs = sizes
        self.done.append(f"{sizes.num_steps} sizes")
        on_progress(1, 1)
        return sizes.num_steps

    def drop_graphs(self) -> None:
        if self._graphs.num_steps:
            self._gpu.release(GIB)
            self._gpu.libraries -= 7 * MIB * self._graphs.num_steps
        self._graphs = GraphSizes([], [])
        torch.cuda.empty_cache()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu(monkeypatch)
    properties = SimpleNamespace(total_memory=80 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(loading, "require_full_precision", lambda: None)
    monkeypatch.setattr(loading, "CudaCapturer", lambda: None)
    monkeypatch.setattr(loading, "load_weights", lambda *_, **__: None)
    monkeypatch.setattr(loading, "ModelRunner", lambda *_, **__: Model(gpu))
    return gpu


def load(told: list[str], **settings: object) -> tuple[LoadedModel, Model]:
    config = EngineConfig.parse(settings)
    loaded = load_model(config, Path("nowhere"), MODEL, lambda: pytest.fail("tokens"), told.append)
    model: Any = loaded.runner
    return loaded, model


def test_all_of_the_share_is_used_and_no_more(gpu: Gpu) -> None:
    told: list[str] = []
    loaded, model = load(told)
    # Of 33 and 32 sizes the largest, the smallest, and every eighth are measured: after libraries
    # have loaded what they need for these.
    assert model.done == [
        "block",
        "10 sizes",
        "warm-up",
        "10 sizes",
        "cache",
        "65 sizes",
        "warm-up",
    ]
    taken = gpu.reserved + gpu.libraries  # with what the largest step leaves to smaller ones
    assert 0.9 * 80 * GIB - 2 * BLOCK < taken <= 0.9 * 80 * GIB
    assert told[-1].startswith(
        "65 CUDA graphs, for steps of up to 33 sequences, and of up to 2,048"
    )
    assert told[-1].endswith("and 1.44 GiB")
    assert loaded.is_ahead
    assert "(Any, bfloat16, cuda)" in loaded.description


def test_without_graphs_their_memory_is_for_the_cache(gpu: Gpu) -> None:
    loaded, model = load([], enforce_eager=True)
    assert model.done == ["block", "warm-up", "cache", "warm-up"]
    # The share without weights, libraries, the largest step, and the block that it was run with.
    assert loaded.kv_cache.num_blocks == (72 - 16 - 1 - 3) * GIB // BLOCK - 1


def test_what_graphs_find_beside_a_cache_of_a_given_size_is_left_to_the_user(gpu: Gpu) -> None:
    loaded, model = load([], num_gpu_blocks_override=600)
    assert model.done == ["block", "warm-up", "cache", "65 sizes", "warm-up"]
    assert loaded.kv_cache.num_blocks == 600


def test_a_step_that_does_not_fit_is_named_whatever_runs_it_first(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Model, "capture_graphs", fail)
    with refuses("insufficient_memory", "max_num_batched_tokens", match="a step of 8192"):
        load([])


def test_blocks_and_heads_without_kernels_are_refused_before_anything_is_loaded(gpu: Gpu) -> None:
    with refuses("unsupported", "block_size", match="must be 16, 32 or 64 on a GPU"):
        load([], block_size=8)
    MODEL.head_dim = 8
    try:
        with refuses("unsupported", "config.json: head_dim", match=r"\(got 8\)"):
            load([])
    finally:
        MODEL.head_dim = 64
    assert gpu.reserved == 0


def test_a_prompt_must_fit_into_a_step_that_may_not_be_split(gpu: Gpu) -> None:
    with refuses("invalid_setting", "max_num_batched_tokens", match=r"max_model_len \(4096\)"):
        load([], enable_chunked_prefill=False, max_num_batched_tokens=4095)
    with refuses("invalid_setting", "max_model_len", match="must be at most 4096"):
        load([], max_model_len=4097)


def test_the_null_device_takes_no_memory(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.torch.cuda, "is_available", lambda: pytest.fail("a GPU"))
    config = EngineConfig.parse({"device": "null:5", "swap_space": 1})
    loaded = load_model(config, Path("nowhere"), MODEL, lambda: [3, 5, 100], lambda text: None)
    assert gpu.reserved == 0
    assert loaded.num_host_blocks == GIB // BLOCK
    assert loaded.kv_cache.num_blocks == 256 * 4096 // 16 + 1
    with refuses("invalid_setting", "device"):
        load_model(config, Path("nowhere"), MODEL, lambda: [100], lambda text: None)
