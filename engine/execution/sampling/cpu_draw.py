"""The draw on a CPU by our kernel."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampling.draw import DrawParams
from engine.execution.sampling.step_arrays import DeviceArrays
from engine.execution.sampling.uniform import uniform_numbers
from kernels.cpu.draw import draw_tokens


class CpuDraw:
    """The same draw as that of `TorchDraw`, from the same random numbers."""

    def __init__(self, params: DrawParams) -> None:
        """Plan it, the random numbers included."""
        uniform = np.zeros_like(params.temperature)
        if params.temperature.any():
            uniform = uniform_numbers(params.seeds, params.positions)
        columns = (params.temperature, params.top_k, params.top_p, params.min_p, uniform)
        self._columns = [torch.from_numpy(column) for column in columns]

    def draw(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Do what `Draw.draw` says."""
        return draw_tokens(logits, *self._columns)
