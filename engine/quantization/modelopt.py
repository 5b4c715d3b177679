"""The checkpoints of NVIDIA's ModelOpt: FP8 with one scale, and NVFP4.

Newer ones have a `quantization_config`; older ones have the same in `hf_quant_config.json`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.fields import Fields, read_json_object
from engine.quantization.format import Format
from engine.quantization.fp8 import Fp8
from engine.quantization.nvfp4 import Nvfp4

_FILE = "hf_quant_config.json"


def parse_modelopt(config: Fields) -> Format:
    """Read a `quantization_config` whose method is modelopt."""
    match config.text("quant_algo"):
        case "FP8":
            return Fp8("weight_scale", input_scale_name="input_scale")
        case "NVFP4":
            return Nvfp4("weight", "weight_scale_2", "input_scale", divides=False)
    raise config.unsupported(
        "quant_algo", f"{config.raw('quant_algo')!r} is not supported; only FP8 and NVFP4"
    )


def read_quantization_file(checkpoint: Path) -> Fields | None:
    """Return `hf_quant_config.json` as a `quantization_config`; None: it is not there.

    Raises:
        CheckpointError: it is broken.
    """
    if not (checkpoint / _FILE).is_file():
        return None
    fields = Fields(read_json_object(checkpoint / _FILE), name=_FILE)
    found = fields.child("quantization")
    if found is None or found.raw("quant_algo") is None:
        return None  # ModelOpt writes null for models in floating point
    names: dict[str, Any] = {"quant_method": "modelopt", "ignore": found.texts("exclude_modules")}
    return found.over(names)
