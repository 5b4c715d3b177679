"""ExpertCounts: how often each expert of a mixture was chosen."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.execution.downloads import Download, Downloads
from engine.layers.moe import MoE


class ExpertCounts:
    """Reads the counters of a model's mixtures without waiting for the device."""

    def __init__(self, model: nn.Module, downloads: Downloads) -> None:
        """Read those of `model`, which may have none."""
        self._totals: list[Tensor] = [
            module.expert_totals for module in model.modules() if isinstance(module, MoE)
        ]
        self._downloads = downloads
        self._download: Download | None = None

    @torch.inference_mode()
    def read(self) -> NDArray[Any] | None:
        """Return int64 [mixtures, experts], the choices up to the call before this one.

        None at the first call, and for a model without mixtures.
        """
        if not self._totals:
            return None
        found = None if self._download is None else self._download.wait()[0]
        self._download = self._downloads.start([torch.stack(self._totals)])
        return found
