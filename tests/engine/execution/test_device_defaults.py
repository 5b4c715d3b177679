"""Sequences and tokens of a step, as a device decides where the settings do not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.execution.device_defaults import (
    CPU_LIMITS,
    GPU_LIMITS,
    LARGE_GPU_LIMITS,
    ResolvedConfig,
    resolve,
)
from engine.service.stages.tokenizer_queue import TokenizerQueue

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
    with pytest.raises(ConfigError, match=r"^max_num_seqs: must be at most 4096 on a GPU \(got 40"):
        resolve(EngineConfig.parse({"max_num_seqs": 4097}), CUDA)
    assert resolve(EngineConfig.parse({"max_num_seqs": 4097}), CPU).max_num_seqs == 4097


def test_other_settings_stay_as_they_are() -> None:
    config = EngineConfig.parse({"model": "x", "max_batch_size": "5", "block_size": 32})
    resolved = resolve(config, CPU)
    assert limits(resolved) == (5, CPU_LIMITS.max_num_batched_tokens)
    given = config.model_dump(exclude={"max_num_batched_tokens"})
    assert resolved.model_dump(exclude={"max_num_batched_tokens"}) == given


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
