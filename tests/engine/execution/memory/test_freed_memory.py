"""Memory that has been freed goes back to the system, also what lies between used pieces."""

from __future__ import annotations

import psutil
import torch

from engine.execution.model_weights import return_freed_memory


def test_what_lies_between_used_pieces_is_given_back() -> None:
    process = psutil.Process()
    return_freed_memory()
    # Small enough for the heap; every other piece stays.
    pieces = [torch.ones(2**14) for _ in range(2000)]
    del pieces[::2]
    before = process.memory_info().rss
    return_freed_memory()
    given_back = before - process.memory_info().rss
    assert given_back > 0.8 * 1000 * 2**16
    assert all(bool((piece == 1).all()) for piece in pieces)
