"""Which device serves the model, and which ones are refused."""

from __future__ import annotations

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import UnsupportedError
from engine.execution.device_choice import choose_device


def with_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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
    assert choose_device(EngineConfig.parse({"model": "m"})).type == "cuda"
