"""OpenMP's spin time: how long its threads spin between the operations of a step on a CPU.

To wake them for each operation would make a step a fifth longer; awake, they keep the server from
the cores. Between steps they sleep.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from engine.checkpoint.hub import resolve_checkpoint
from engine.config.engine_config import EngineConfig
from engine.models.registry import read_model_spec

# Below it a step is short, and its responses so many that the server needs the cores more.
_WIDE = 512  # hidden_size
_LONG, _SHORT = "10000", "1000"  # iterations of 16 ns or so


def set_wait(config: EngineConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Set libgomp's variables in `environ` for the model of `config`; those that are set stay.

    It has no effect once torch is imported.

    Raises:
        CheckpointError: the model's configuration cannot be found or read.
    """
    model = read_model_spec(resolve_checkpoint(config.model, weights=False), config.hf_overrides)
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environ.setdefault("GOMP_SPINCOUNT", _LONG if model.hidden_size >= _WIDE else _SHORT)
