"""The formats of quantised checkpoints that Trident reads."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from engine.checkpoint.tensor_files.headers import read_headers
from engine.config.setting_types import Quantization, QuantizationSetting
from engine.errors import UnsupportedError
from engine.fields import Fields, read_json_object
from engine.quantization.awq import parse_awq
from engine.quantization.bitsandbytes import parse_bitsandbytes
from engine.quantization.bitsandbytes4 import is_4_bit, read_4_bit_checkpoint
from engine.quantization.compressed_tensors import parse_compressed_tensors
from engine.quantization.format import Format, QuantizedCheckpoint
from engine.quantization.fp8 import Fp8, named_as_stored, parse_fp8
from engine.quantization.gguf import read_gguf_checkpoint
from engine.quantization.gptq import parse_gptq
from engine.quantization.ignored import is_ignored
from engine.quantization.modelopt import parse_modelopt, read_quantization_file
from engine.quantization.mxfp4 import parse_mxfp4

_PARSERS: dict[str, Callable[[Fields], Format]] = {
    "awq": parse_awq,
    "bitsandbytes": parse_bitsandbytes,
    "compressed-tensors": parse_compressed_tensors,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "modelopt": parse_modelopt,
    "mxfp4": parse_mxfp4,
}

# Fields that name the modules that are not quantised.
_IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules")
# Names of the configuration in `config.json`; the second is llm-compressor's first.
_CONFIGS = ("quantization_config", "compression_config")
_METHOD = "quant_method"
# vLLM's names of kernels, by the format that they are for.
_OF_KERNELS = {"awq_marlin": "awq", "gptq_marlin": "gptq", "modelopt_fp4": "modelopt"}


@dataclass(frozen=True, slots=True)
class OneFormat(QuantizedCheckpoint):
    """A checkpoint with one format for all that is quantised.

    Attributes:
        folder: of the checkpoint.
        ignored: patterns of the names of modules that are not.
    """

    folder: Path
    format: Format
    ignored: tuple[str, ...]

    @property
    def label(self) -> str:
        return self.format.label

    def tensor_names(self) -> Collection[str]:
        return read_headers(self.folder)

    def format_of(self, module: str, *, is_expert: bool) -> Format | None:
        is_other = self.format.is_of_experts and not is_expert
        return None if is_other or is_ignored(module, self.ignored) else self.format


def while_loading(
    asked: QuantizationSetting | None, checkpoint: Path | None
) -> Quantization | None:
    """Return how weights are to be quantised while they are loaded; None: not at all.

    Args:
        asked: a setting that may also name how the checkpoint is stored.
        checkpoint: its folder; None: there is none, weights are made up.

    Raises:
        UnsupportedError: the checkpoint is not stored so.
    """
    if asked is None or asked == "int8" or asked == "int4":
        return asked
    _, config = (None, None) if checkpoint is None else _configuration(checkpoint)
    method = config and config.text(_METHOD)
    if _OF_KERNELS.get(asked, asked) == method:
        return None
    if asked == "fp8":
        return asked
    stored = f"has the format {method}" if method else "is not quantised"
    raise UnsupportedError(
        f"{asked} does not match the checkpoint, which {stored}; leave it out", param="quantization"
    )


def read_quantization(checkpoint: Path) -> QuantizedCheckpoint | None:
    """Read how the checkpoint in a folder is quantised; None: it is not.

    Raises:
        UnsupportedError: a format or a variant that Trident does not read.
        CheckpointError: a field is missing or wrong.
    """
    fields, config = _configuration(checkpoint)
    if config is None:
        return None
    method = config.text(_METHOD)
    if method == "gguf":
        return read_gguf_checkpoint(checkpoint, fields)
    if method not in _PARSERS:
        supported = ", ".join(_PARSERS)
        raise config.unsupported(_METHOD, f"{method!r} is not supported; supported: {supported}")
    ignored = tuple(name for field in _IGNORED for name in config.texts(field) or ())
    if is_4_bit(config):
        return read_4_bit_checkpoint(checkpoint, config, ignored)
    fmt = _PARSERS[method](config)
    if method == "fp8" and isinstance(fmt, Fp8):
        fmt = named_as_stored(fmt, read_headers(checkpoint))
    return OneFormat(checkpoint, fmt, ignored)


def _configuration(checkpoint: Path) -> tuple[Fields, Fields | None]:
    """Return `config.json`, and the quantisation config in it or in a file beside it."""
    fields = Fields(read_json_object(checkpoint / "config.json"), name="config.json")
    parts = [part for part in (fields, fields.child("text_config")) if part is not None]
    named = [part.child(name) for part in parts for name in _CONFIGS]
    found = [each for each in named if each is not None]
    return fields, found[0] if found else read_quantization_file(checkpoint)
