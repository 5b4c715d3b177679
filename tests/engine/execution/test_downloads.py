"""Results of steps on their way to the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.execution import downloads as module
from engine.execution.downloads import Downloads, pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("packed", [True, False])
def test_tensors_come_back_as_they_were(packed: bool) -> None:
    tensors = [
        torch.tensor([2**40, -1]),
        torch.tensor([3, -4, 5], dtype=torch.int32),
        torch.tensor([[0.5, -1.0], [2.0, torch.inf]]),
        torch.empty(0, 3, dtype=torch.float32),
    ]
    downloads = Downloads(CPU)
    found = (downloads.copy(pack(tensors)) if packed else downloads.start(tensors)).wait()
    for array, tensor in zip(found, tensors, strict=True):
        assert array.dtype == tensor.numpy().dtype
        np.testing.assert_array_equal(array, tensor.numpy())


def test_what_is_launched_later_does_not_change_them() -> None:
    """Nor does the next copy to the same memory."""
    downloads = Downloads(CPU)
    words = torch.arange(4, dtype=torch.int32)
    packed = pack([words])._replace(words=words)
    first = downloads.copy(packed)
    words.fill_(7)
    second = downloads.copy(packed)
    (found,) = first.wait()
    words.fill_(8)
    third = downloads.copy(packed)
    assert found.tolist() == [0, 1, 2, 3]
    assert second.wait()[0].tolist() == [7] * 4
    assert third.wait()[0].tolist() == [8] * 4
    assert found.tolist() == first.wait()[0].tolist() == [0, 1, 2, 3]


def test_memory_and_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in flight and one being read, of sizes that grow at first."""
    sizes: list[int] = []
    empty = torch.empty

    def counted(size: int, **settings: object) -> torch.Tensor:
        sizes.append(size)
        return empty(size, dtype=torch.int32)

    monkeypatch.setattr(module.torch, "empty", counted)
    downloads = Downloads(CPU)
    in_flight = None
    for size in (1, 100, 90, *[100] * 50):
        launched = downloads.copy(pack([torch.zeros(size)]))
        if in_flight is not None:
            in_flight.wait()
        in_flight = launched
    assert sizes == [1, 100, 90, 100]
