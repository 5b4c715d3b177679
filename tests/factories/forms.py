"""Which forms of projections there are on this machine."""

import torch

from engine.config.setting_types import Quantization
from engine.errors import UnsupportedError
from engine.models.process_weights import check_quantization
from kernels.cpu import linear as panels

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
_CPU = torch.device("cpu")


def in_panels(dtype: torch.dtype) -> bool:
    """Return whether our own kernels serve weights of `dtype`."""
    return panels.serves(torch.zeros(4, 4, dtype=dtype), _CPU)


def runs_panels(dtype: torch.dtype) -> bool:
    """Return whether our own kernels can multiply with weights of `dtype`.

    Where oneDNN's products are faster they do not serve, but can be tested.
    """
    return panels.runs(torch.zeros(4, 4, dtype=dtype), _CPU)


def quantizes(dtype: torch.dtype, quantization: Quantization = "int8") -> bool:
    """Return whether weights of `dtype` can be quantised."""
    try:
        check_quantization(quantization, _CPU, dtype)
    except UnsupportedError:
        return False
    return True


def rounding(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2
