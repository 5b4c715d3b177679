"""CUDA graphs are captured while other threads of the process use the GPU."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.execution.graphs.step_graphs import CudaCapturer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_capture_survives_calls_of_other_threads() -> None:
    """An allocation, which is forbidden to the thread that captures."""
    x = torch.randn(1024, device="cuda")
    is_capturing, has_allocated = threading.Event(), threading.Event()
    errors: list[Exception] = []

    def allocate() -> None:
        try:
            is_capturing.wait(60)
            torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
            torch.cuda.Stream().synchronize()
            del_me = torch.empty(2**28, dtype=torch.uint8, device="cuda")
            del del_me
        except Exception as error:
            errors.append(error)
        finally:
            has_allocated.set()

    doubled = torch.empty_like(x)

    def work() -> None:
        torch.mul(x, 2, out=doubled)
        if torch.cuda.is_current_stream_capturing():
            is_capturing.set()
            assert has_allocated.wait(60)

    other = threading.Thread(target=allocate)
    other.start()
    try:
        graph = CudaCapturer().capture(work)
    finally:
        is_capturing.set()
        other.join()
    assert not errors
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (doubled == 6).all()
