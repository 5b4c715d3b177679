"""The device that serves the model, and the settings whose defaults depend on it."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import Field

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, UnsupportedError


class ResolvedConfig(EngineConfig):
    """The settings of an engine: neither its device nor the limits of a step are open."""

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
_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies


def choose_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the device that `config` asks for: a GPU, if there is one, unless it names another.

    Each rank of a model has a GPU of its own. The null device is torch's meta device, whose tensors
    take no memory.

    Raises:
        ConfigError: there is no GPU, but `device` asks for one.
        UnsupportedError: the GPU is too old for the kernels, or there are fewer than ranks.
    """
    if config.null_step_s is not None:
        return torch.device("meta")
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "cuda needs a GPU, but torch sees no CUDA device; set it to cpu, or check the driver",
            param="device",
        )
    if not has_cuda or config.device == "cpu":
        return torch.device("cpu")
    if (count := torch.cuda.device_count()) < config.tensor_parallel_size:
        raise UnsupportedError(
            f"must be at most {count} here, as each process has a GPU of its own (got "
            f"{config.tensor_parallel_size}); set it to that, or set device to cpu",
            param="tensor_parallel_size",
        )
    device = torch.device("cuda", rank)
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{_dotted(capability)}, but the GPU kernels need {_dotted(_OLDEST_CAPABILITY)} "
            "(Ampere) or newer; use another GPU, or set device to cpu",
            param="device",
        )
    return device


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)


def require_full_precision() -> None:
    """Have products summed in float32, and products of float32 multiplied in float32.

    By default partial sums of a split bfloat16 or float16 product are rounded to that type before
    they are added.
    """
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_fp16_accumulation = False
    matmul.allow_tf32 = False


def resolve(config: EngineConfig, device: torch.device) -> ResolvedConfig:
    """Return `config` with the defaults for `device`; what the user has set stays.

    Where only one of the two limits is set, the default of the other one is adapted:
    `max_num_batched_tokens` is never below `max_num_seqs`.

    Raises:
        ConfigError: the kernels of `device` do not serve as many sequences.
        UnsupportedError: speculative decoding is not supported there.
    """
    if config.speculative_config is not None:
        if device.type != "cpu":
            raise UnsupportedError(
                "speculative decoding is supported on CPU only; leave it out",
                param="speculative_config",
            )
        if config.async_scheduling:
            raise ConfigError("must be false with speculative_config", param="async_scheduling")
    seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
    default = _step_limits(device)
    if seqs is None:
        seqs = min(default.max_num_seqs, tokens or default.max_num_batched_tokens)
    if tokens is None:
        tokens = max(default.max_num_batched_tokens, seqs)
    if device.type == "cuda" and seqs > _MOST_SEQS:
        raise ConfigError(
            f"must be at most {_MOST_SEQS} on a GPU (got {seqs})", param="max_num_seqs"
        )
    known: dict[str, object] = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    if config.device == "auto":
        known["device"] = device.type
    return ResolvedConfig.model_validate(config.model_dump(exclude_unset=True) | known)


def _step_limits(device: torch.device) -> StepLimits:
    if device.type == "meta":  # the null device, which is for measuring the host of a large GPU
        return LARGE_GPU_LIMITS
    if device.type != "cuda":
        return CPU_LIMITS
    is_large = torch.cuda.get_device_properties(device).total_memory >= _LARGE
    is_fast = torch.cuda.get_device_capability(device) >= _FAST_CAPABILITY
    return LARGE_GPU_LIMITS if is_large and is_fast else GPU_LIMITS
