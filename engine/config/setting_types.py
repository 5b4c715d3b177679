"""The values that settings of several modules take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from engine.config import null_device
from engine.config.speculative_config import SpeculativeConfig
from engine.json_reader import parse_json
from engine.text.output_parsing.tags import AUTO, NONE, REASONING, TOOL_CALLS

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


def _parsed(value: Any) -> Any:
    """Return the object that a text is, as a variable or a flag gives it; else `value`."""
    return parse_json(value, "", ValueError) if isinstance(value, str) else value


JsonObject = Annotated[dict[str, Any] | None, BeforeValidator(_parsed)]
Speculative = Annotated[SpeculativeConfig | None, BeforeValidator(_parsed)]


def _known_device(value: str) -> str:
    if value not in ("auto", "cpu", "cuda") and null_device.step_s(value) is None:
        raise ValueError(
            "must be auto, cpu, cuda, or null:MS with the milliseconds of a step (0 to "
            f"{null_device.MAX_STEP_MS})"
        )
    return value


Device = Annotated[str, AfterValidator(_known_device)]


def _path_text(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


PathText = Annotated[str, BeforeValidator(_path_text)]


def _named(value: str) -> str:
    if not value.strip():
        raise ValueError("must name a checkpoint folder, a GGUF file or a hub id")
    return value


Model = Annotated[PathText, AfterValidator(_named)]


def _secret(value: str) -> str:
    if not re.fullmatch(r"[!-~]{16,256}", value, re.ASCII):
        raise ValueError("must be 16 to 256 visible ASCII characters: see openssl rand -hex 32")
    return value


TenantKey = Annotated[str, AfterValidator(_secret)]


def _one_of(known: Iterable[str]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in (AUTO, NONE, *known):
            raise ValueError(f"must be {AUTO}, {NONE} or one of {', '.join(known)}")
        return value

    return check


ReasoningParser = Annotated[str, AfterValidator(_one_of(REASONING))]
ToolCallParser = Annotated[str, AfterValidator(_one_of(TOOL_CALLS))]


def _same_for_auto(value: Any) -> Any:
    return None if value in ("auto", "-1", -1) else value


# vLLM's `auto` and -1: what fits, which nothing stands for here
Length = Annotated[Annotated[Integer, Field(ge=2)] | None, BeforeValidator(_same_for_auto)]


def _no_stage(value: str) -> str:
    if value in ("tokenizer", "engine", "detokenizer", "tensorrt_llm_bls", ".", ".."):
        raise ValueError("must not be the name of a stage, `.` or `..`")
    return value


ServedModelName = Annotated[
    str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$"), AfterValidator(_no_stage)
]
