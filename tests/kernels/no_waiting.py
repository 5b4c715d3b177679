"""Raises on host-device synchronisation: by torch on a GPU, by operation without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.support import DEVICE


class _NoWaiting(TorchDispatchMode):
    """Refuses operations whose result the host needs."""

    _WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_unique", "equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not name.startswith(self._WAITS), name
        if name in ("index", "index_put_"):
            assert not any(index.dtype == torch.bool for index in args[1] if index is not None)
        if name == "repeat_interleave":
            assert kwargs["output_size"] is not None
        return func(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise on synchronisation in the block. Needs `ignore:Synchronization debug mode`."""
    # torch.tensor copies to a device from pageable memory, which synchronises.
    refused = AssertionError("torch.tensor")
    with torch.inference_mode(), _NoWaiting(), mock.patch("torch.tensor", side_effect=refused):
        if DEVICE.type != "cuda":
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
