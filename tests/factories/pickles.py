"""Weights that are a pickle, and run code where they are loaded."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any


class Payload:
    """Leaves a file where unpickling it happens."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def replace_weights_by_a_pickle(checkpoint: Path, mark: Path) -> None:
    """Put a `Payload` in place of the safetensors of a checkpoint."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(mark)))
