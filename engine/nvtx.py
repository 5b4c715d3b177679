"""NVTX ranges: the parts of a step by name, in the timeline of a profiler such as Nsight Systems.

A profiler announces itself in the environment of the processes that it starts. Without one, a
function stays as it is: ranges cost nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# The library that NVTX loads to send ranges to, and what Nsight Systems sets beside it.
_ANNOUNCEMENTS = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")


def is_recorded(environ: Mapping[str, str]) -> bool:
    """Return whether a profiler has started this process, and torch can send it ranges."""
    if not any(map(environ.get, _ANNOUNCEMENTS)):
        return False
    import torch  # not imported for this alone in processes that compute nothing

    return torch.version.cuda is not None


_RECORDED = is_recorded(os.environ)


def nvtx_range(
    name: str, *, recorded: bool = _RECORDED
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that makes each call of a function a range called `name`.

    Work that is captured in a CUDA graph has no ranges of its own when the graph is replayed.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        if not recorded:
            return function
        import torch

        nvtx = torch.cuda.nvtx

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            nvtx.range_push(name)  # type: ignore[no-untyped-call]
            try:
                return function(*args, **kwargs)
            finally:
                nvtx.range_pop()  # type: ignore[no-untyped-call]

        return call

    return decorate
