"""Forward passes of nothing but padding, to time them."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.execution.step_graphs import Rows


def run_padding(
    forward: Rows,
    num_rows: int,
    num_tokens: int,
    num_decodes: int | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Launch `forward` for idle rows with equally many tokens each; return what it returns.

    It does all of a step but attention, and changes nothing.
    """
    nobody = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
    starts = torch.linspace(0, num_tokens, num_rows + 1).int().to(device)
    return forward(nobody, starts, num_tokens, num_decodes)
