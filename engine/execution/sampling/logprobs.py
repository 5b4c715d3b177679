"""Log-probabilities of the rows that ask for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.core.schedule import Int32s
from engine.execution.sampling.step_arrays import DeviceArrays, StepArrays
from kernels import device
from kernels.sampling.logprobs import token_logprobs


class Logprobs(NamedTuple):
    """Log-probabilities of the chosen and of the most likely tokens of K rows."""

    chosen: Tensor  # float32 [K]
    ranks: Tensor  # [K], 1 is the most likely token
    top_token_ids: Tensor  # int64 [K, N]
    top_logprobs: Tensor  # float32 [K, N]


class LogprobsPlan:
    """Which rows of a step ask for log-probabilities, which are those before any processing."""

    def __init__(self, rows: NDArray[np.int64], num_top: Int32s, arrays: StepArrays) -> None:
        """Plan to find the `num_top[i]` most likely tokens, at most the whole vocabulary."""
        self.rows, self.num_top = rows, num_top
        self._part = arrays.add(rows)

    def keep(self, logits: Tensor, arrays: DeviceArrays) -> Tensor:
        """Return a copy of the rows of `logits`, float32 [R, V], before these change."""
        return logits[arrays[self._part]]

    def compute(self, kept: Tensor, token_ids: Tensor, arrays: DeviceArrays) -> Logprobs:
        """Look up the drawn tokens, `token_ids` int64 [R], in the kept rows."""
        chosen, num_top = token_ids[arrays[self._part]], int(self.num_top.max())
        find = token_logprobs if device.runs_triton(kept) else _torch_logprobs
        return Logprobs(*find(kept, chosen, num_top))


def _torch_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    values, indices = logprobs.topk(num_top, dim=-1)
    return chosen[:, 0], ranks, indices, values
