"""The formats of quantised checkpoints that Trident reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.fields import Fields, read_json_object
from engine.quantization.awq import parse_awq
from engine.quantization.bitsandbytes import parse_bitsandbytes
from engine.quantization.compressed_tensors import parse_compressed_tensors
from engine.quantization.format import Format
from engine.quantization.fp8 import parse_fp8
from engine.quantization.gptq import parse_gptq
from engine.quantization.mxfp4 import parse_mxfp4

_PARSERS: dict[str, Callable[[Fields], Format]] = {
    "awq": parse_awq,
    "bitsandbytes": parse_bitsandbytes,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
}

# Fields that name the modules that are not quantised.
_IGNORED = ("ignore", "modules_to_not_convert", "llm_int8_skip_modules")


@dataclass(frozen=True, slots=True)
class QuantizedCheckpoint:
    """How a checkpoint is quantised.

    Attributes:
        ignored: names of modules that are not, also as parts of longer names; `re:` begins a
            regular expression.
    """

    format: Format
    ignored: tuple[str, ...]

    def is_quantized(self, module: str) -> bool:
        """Return whether the projection `module`, as the checkpoint names it, is quantised."""
        return not any(_matches(pattern, module) for pattern in self.ignored)


def read_quantization(checkpoint: Path) -> QuantizedCheckpoint | None:
    """Read how the checkpoint in a folder is quantised; None: it is not.

    Raises:
        UnsupportedError: a format or a variant that Trident does not read.
        CheckpointError: a field is missing or wrong.
    """
    fields = Fields(read_json_object(checkpoint / "config.json"), name="config.json")
    config = fields.child("quantization_config")
    if config is None and (text := fields.child("text_config")) is not None:
        config = text.child("quantization_config")
    if config is None:
        return None
    method = config.text("quant_method")
    if method not in _PARSERS:
        supported = ", ".join(_PARSERS)
        raise config.unsupported(
            "quant_method", f"{method!r} is not supported; supported: {supported}"
        )
    ignored = tuple(name for field in _IGNORED for name in config.texts(field) or ())
    return QuantizedCheckpoint(_PARSERS[method](config), ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return f".{pattern}." in f".{module}."
