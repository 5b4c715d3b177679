"""Prompts for all tests, and the CPU meter of a machine that does nothing else."""

from collections.abc import Iterator

import psutil
import pytest

from client.bench.load.prompts import PromptSource
from client.bench.measure import run
from client.bench.measure.cpu import OTHERS, STOLEN
from engine.demo import CHECKPOINT_DIR


@pytest.fixture(scope="module")
def source() -> PromptSource:
    return PromptSource(CHECKPOINT_DIR)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """CPU seconds of other programs in each coming run; 0 after the last."""
    others: list[float] = []

    class Meter:
        def __init__(self, *pids: int, clients: list[int]) -> None:
            assert all(psutil.pid_exists(pid) for pid in (*pids, *clients))

        def used(self) -> dict[str, float]:
            return {OTHERS: others.pop(0) if others else 0.0, STOLEN: 0.0}

    monkeypatch.setattr(run, "CpuMeter", Meter)
    yield others
    assert not others
