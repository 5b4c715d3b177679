"""The experts of a mixture: gated MLPs of which each token goes through a few."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from engine.layers.int8_linear import quantize_channels
from engine.layers.linear import parameter
from kernels.cpu.activation import Activation
from kernels.cpu.experts import experts_in_panels
from kernels.cpu.linear import interleave, pack, pack_int8, pad_channels
from kernels.experts import experts


class Experts(nn.Module):
    """`num_experts` gated MLPs with `size` features between.

    `engine.models.conversion` replaces it after loading by a form that is faster on its device.

    Attributes:
        gate_up: [num_experts, 2 * size, hidden_size], the gates of each first.
        down: [num_experts, hidden_size, size].
    """

    def __init__(
        self,
        hidden_size: int,
        size: int,
        num_experts: int,
        *,
        activation: Activation,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.gate_up = parameter(num_experts, 2 * size, hidden_size, dtype=dtype, device=device)
        self.down = parameter(num_experts, hidden_size, size, dtype=dtype, device=device)
        self.activation = activation

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [T, hidden_size].

        Args:
            x: [T, hidden_size].
            expert_ids: int64 [T, top_k].
            weights: float32 [T, top_k].
        """
        return experts(x, self.gate_up, self.down, expert_ids, weights, self.activation)

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        places: dict[str, Tensor] = {}
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            places |= {f"experts.{i}.{name}.weight": part for name, part in parts.items()}
        return places


class PanelExperts(nn.Module):
    """Experts on a CPU whose weights are packed in panels, as our own kernels read them.

    A token's result does not depend on the others, to the last bit.

    Args:
        source: with whose weights `kernels.cpu.linear.runs`, and whose size `can_gate`; copied.
        int8: as in `PanelLinear`.
    """

    def __init__(self, source: Experts, *, int8: bool = False) -> None:
        super().__init__()
        self._size = source.down.shape[2]
        self._activation = source.activation
        interleaved = (interleave(gate_up) for gate_up in source.gate_up)
        self._gate_up, self._gate_up_scale = _pack_all(interleaved, int8=int8)
        self._down, self._down_scale = _pack_all(source.down, int8=int8)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """As in `Experts`."""
        return experts_in_panels(
            x,
            self._gate_up,
            self._down,
            expert_ids,
            weights,
            size=self._size,
            activation=self._activation,
            gate_up_scale=self._gate_up_scale,
            down_scale=self._down_scale,
        )


def _pack_all(weights: Iterable[Tensor], *, int8: bool) -> tuple[Tensor, Tensor | None]:
    """Return the panels of all weights, stacked, and the scales of int8 ones."""
    if not int8:
        return torch.stack([pack(weight) for weight in weights]), None
    quantized = [quantize_channels(weight) for weight in weights]
    panels = torch.stack([pack_int8(steps) for steps, _ in quantized])
    return panels, torch.stack([pad_channels(scale) for _, scale in quantized])
