"""Settings whose defaults depend on the device: how many sequences and tokens one step may have."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from engine.config import EngineConfig
from engine.errors import ConfigError


class ResolvedConfig(EngineConfig):
    """The settings of an engine whose device is known: none of the limits of a step is open."""

    max_num_seqs: Annotated[int, Field(ge=1)]
    max_num_batched_tokens: Annotated[int, Field(ge=1)]


class StepLimits(NamedTuple):
    """Sequences that run at once, and tokens of one step."""

    max_num_seqs: int
    max_num_batched_tokens: int


# Those of vLLM's server, except that it allows 1,024 sequences on a large GPU.
CPU_LIMITS = StepLimits(64, 2048)
GPU_LIMITS = StepLimits(256, 2048)
LARGE_GPU_LIMITS = StepLimits(256, 8192)
_MOST_SEQS = 4096  # one program of a GPU plans attention for all decode rows of a step
_LARGE = 70 * 2**30  # bytes; one of "80 GB" has somewhat less than 80 GiB
# An A100 of 80 GB is not among them: vLLM measured that steps of 8,192 tokens make it slower.
_FAST_CAPABILITY = (9, 0)


def resolve(config: EngineConfig, device: torch.device) -> ResolvedConfig:
    """Return `config` with the defaults for `device`; what the user has set stays.

    Where only one of the two limits is set, the default of the other one gives way:
    `max_num_batched_tokens` is never below `max_num_seqs`.

    Raises:
        ConfigError: the kernels of `device` do not serve as many sequences.
    """
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    default = _step_limits(device)
    if seqs is None:
        seqs = min(default.max_num_seqs, tokens or default.max_num_batched_tokens)
    if tokens is None:
        tokens = max(default.max_num_batched_tokens, seqs)
    if device.type == "cuda" and seqs > _MOST_SEQS:
        raise ConfigError(f"max_num_seqs: must be at most {_MOST_SEQS} on a GPU (got {seqs})")
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return ResolvedConfig.model_validate(config.model_dump(exclude_unset=True) | limits)


def _step_limits(device: torch.device) -> StepLimits:
    if device.type == "meta":  # the null device, which is for measuring the host of a large GPU
        return LARGE_GPU_LIMITS
    if device.type != "cuda":
        return CPU_LIMITS
    is_large = torch.cuda.get_device_properties(device).total_memory >= _LARGE
    is_fast = torch.cuda.get_device_capability(device) >= _FAST_CAPABILITY
    return LARGE_GPU_LIMITS if is_large and is_fast else GPU_LIMITS
