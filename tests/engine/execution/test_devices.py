"""Which device serves the model, which are refused, and the limits of a step that it decides."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.errors import UnsupportedError
from engine.execution.devices import (
    CPU_LIMITS,
    GPU_LIMITS,
    LARGE_GPU_LIMITS,
    ResolvedConfig,
    choose_device,
    resolve,
)
from engine.service.stages.tokenizer_queue import TokenizerQueue
from tests.factories.errors import refuses

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 2**20
H200, H100, A100, L40S = (150_000, (9, 0)), (81_079, (9, 0)), (81_079, (8, 0)), (45_457, (8, 9))
B200, MIG_SLICE = (183_000, (10, 0)), (47_000, (9, 0))


def limits(config: ResolvedConfig) -> tuple[int, int]:
    return config.max_num_seqs, config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (H200, LARGE_GPU_LIMITS),
        (H100, LARGE_GPU_LIMITS),
        (B200, LARGE_GPU_LIMITS),
        (A100, GPU_LIMITS),
        (L40S, GPU_LIMITS),
        (MIG_SLICE, GPU_LIMITS),
    ],
)
def test_a_gpu_decides_by_memory_and_generation(
    gpu: tuple[int, tuple[int, int]], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory_mib, capability = gpu
    properties = SimpleNamespace(total_memory=memory_mib * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert limits(resolve(EngineConfig(), CUDA)) == expected


def test_large_gpus_run_256_sequences_and_8192_tokens() -> None:
    assert (CPU_LIMITS, GPU_LIMITS, LARGE_GPU_LIMITS) == ((64, 2048), (256, 2048), (256, 8192))


def test_more_sequences_than_the_kernels_of_a_gpu_serve_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    properties = SimpleNamespace(total_memory=H100[0] * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: H100[1])
    assert resolve(EngineConfig.parse({"max_num_seqs": 4096}), CUDA).max_num_seqs == 4096
    with refuses(
        "invalid_setting", "max_num_seqs", match=r"must be at most 4096 on a GPU \(got 40"
    ):
        resolve(EngineConfig.parse({"max_num_seqs": 4097}), CUDA)
    assert resolve(EngineConfig.parse({"max_num_seqs": 4097}), CPU).max_num_seqs == 4097


def test_other_settings_stay_as_they_are() -> None:
    config = EngineConfig.parse({"model": "x", "max_batch_size": "5", "block_size": 32})
    resolved = resolve(config, CPU)
    assert limits(resolved) == (5, CPU_LIMITS.max_num_batched_tokens)
    derived = {"max_num_batched_tokens", "device"}
    assert resolved.device == "cpu"
    assert resolved.model_dump(exclude=derived) == config.model_dump(exclude=derived)


@given(seqs=st.none() | st.integers(1, 10_000), tokens=st.none() | st.integers(1, 10_000))
def test_what_is_set_stays_and_every_sequence_can_advance(
    seqs: int | None, tokens: int | None
) -> None:
    if seqs is not None and tokens is not None:
        tokens = max(seqs, tokens)
    config = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=tokens)
    resolved = resolve(config, CPU)
    assert resolved.max_num_batched_tokens >= resolved.max_num_seqs
    assert seqs in (None, resolved.max_num_seqs)
    assert tokens in (None, resolved.max_num_batched_tokens)


def test_the_queue_before_the_tokenizer_has_room_for_the_slots_of_any_device() -> None:
    most = max(lim.max_num_seqs for lim in (CPU_LIMITS, GPU_LIMITS, LARGE_GPU_LIMITS))
    queue = TokenizerQueue.of(EngineConfig(max_num_queued_reqs=3))
    try:
        assert queue.max_requests == 3 + most
    finally:
        queue.close()


def with_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], count: int = 1
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize(("name", "capability"), [("Tesla T4", (7, 5)), ("Tesla V100", (7, 0))])
def test_a_gpu_without_kernels_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, device: str, name: str, capability: tuple[int, int]
) -> None:
    with_gpu(monkeypatch, name, capability)
    wanted = rf"device: {name} has compute capability 7\.{capability[1]}, .* 8\.0 .* device to cpu"
    with pytest.raises(UnsupportedError, match=wanted):
        choose_device(EngineConfig.parse({"model": "m", "device": device}))
    assert choose_device(EngineConfig.parse({"model": "m", "device": "cpu"})).type == "cpu"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_gpus_are_used(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    with_gpu(monkeypatch, "a GPU", capability)
    assert choose_device(EngineConfig.parse({"model": "m"})) == torch.device("cuda", 0)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "a GPU", (9, 0), count=3)
    config = EngineConfig.parse({"model": "m", "tensor_parallel_size": 3})
    devices = [choose_device(config, rank) for rank in range(3)]
    assert devices == [torch.device("cuda", index) for index in range(3)]
    more = config.model_copy(update={"tensor_parallel_size": 4})
    with pytest.raises(UnsupportedError, match="at most 3 here") as raised:
        choose_device(more)
    assert raised.value.params == ("tensor_parallel_size",)
