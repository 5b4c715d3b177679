"""The values that settings of several modules take."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
KVCacheDtype = Literal["auto", "fp8", "fp8_e4m3"]
Quantization = Literal["int8", "int4", "fp8"]  # while loading
# How a checkpoint is stored: the names of `quant_method`, and of vLLM's kernels for it.
StoredFormat = Literal[
    "awq",
    "awq_marlin",
    "bitsandbytes",
    "compressed-tensors",
    "gguf",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
]
QuantizationSetting = Literal[Quantization, StoredFormat]

_POWERS = "kmgt"


def _without_letter(value: Any) -> Any:
    """Return the integer that a text as `25.6k` or `2G` means; anything else as it is.

    As in vLLM, small letters are powers of 1,000 and large ones powers of 1,024.
    """
    if not isinstance(value, str):
        return value
    pattern = r"(\d{1,15}(?:\.\d{1,9})?)([kmgt])"
    found = re.fullmatch(pattern, value.strip(), re.ASCII | re.IGNORECASE)
    if found is None:
        return value
    power = _POWERS.index(found[2].lower()) + 1
    number = Decimal(found[1]) * (1000 if found[2].islower() else 1024) ** power
    return int(number) if number == int(number) else value


# 32768, or 32K; no more than messages between processes can carry
Integer = Annotated[int, Field(lt=2**63), BeforeValidator(_without_letter)]
