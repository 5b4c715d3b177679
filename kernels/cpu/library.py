"""The built library: its path, and its operators once it is loaded."""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.cpu.target import Target, targets

log = logging.getLogger("trident.kernels")

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parent / "build"


def operations(tensor: Tensor) -> Any | None:
    """Return the operators to use for `tensor`; None if torch's own are used.

    The first call loads the library and logs whether it was found.
    """
    return _load() if tensor.device.type == "cpu" else None


def fast_operations(tensor: Tensor) -> Any | None:
    """Return the operators to use for `tensor`, but None in float32, where torch's own are used.

    float32 results must match transformers' to the last bits, which another summation order would
    change, and a float32 model is bound by reading its weights anyway.
    """
    return None if tensor.dtype == torch.float32 else operations(tensor)


def library_path(target: Target) -> Path:
    """Return where the library for this torch, these sources and `target` is or would be built."""
    digest = hashlib.sha256(repr(target.options).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return BUILT / f"trident_cpu-{torch.__version__}-{target.name}-{digest.hexdigest()[:12]}.so"


def library_name() -> str | None:
    """Return the file name of the library for this machine, None if it is not built."""
    path = _found()
    return None if path is None else path.name


def _found() -> Path | None:
    return next((path for target in targets() if (path := library_path(target)).exists()), None)


@cache
def _load() -> Any | None:
    path = _found()
    if path is None:
        log.warning(
            "No CPU kernels for this machine and torch %s: torch's own operations serve, slower. "
            "`python -m kernels.cpu` builds them.",
            torch.__version__,
        )
        return None
    try:
        torch.ops.load_library(path)
    except OSError as error:
        log.warning("CPU kernels cannot be loaded, torch's own operations serve: %s", error)
        return None
    log.info("CPU kernels: %s", path.name)
    return torch.ops.trident_cpu
