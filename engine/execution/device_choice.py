"""The device that serves the model."""

from __future__ import annotations

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError, UnsupportedError

_OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16 and asynchronous copies


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device that `config` asks for: a GPU, if there is one, unless it says cpu.

    Raises:
        ConfigError: there is no GPU, but `device` asks for one.
        UnsupportedError: the GPU is too old for the kernels.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device")
    if not has_cuda or config.device == "cpu":
        return torch.device("cpu")
    capability = torch.cuda.get_device_capability()
    if capability < _OLDEST_CAPABILITY:
        raise UnsupportedError(
            f"device: {torch.cuda.get_device_name()} has compute capability "
            f"{_dotted(capability)}, but the GPU kernels need {_dotted(_OLDEST_CAPABILITY)} "
            "(Ampere) or newer; use another GPU, or set device to cpu"
        )
    return torch.device("cuda")


def _dotted(capability: tuple[int, int]) -> str:
    return "{}.{}".format(*capability)
