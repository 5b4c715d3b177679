"""QuantizedExperts: the experts of a mixture as a quantised checkpoint stores them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.layers.experts import Experts
from engine.layers.linear import parameter
from engine.quantization.format import Format
from engine.quantization.stored import StoredProjection


class QuantizedExperts(nn.Module):
    """The experts of a mixture, each projection in the tensors of its format.

    `engine.models.conversion` replaces it after loading by what `dequantized` returns, in the form
    for its device.

    Attributes:
        num_bytes_dequantized: of the weights that it stands for.

    Args:
        plain: of the same shape, without memory (on the meta device).
        is_stacked: the checkpoint has one projection of all gates and ups, which alternate, and
            each tensor holds all experts; otherwise each expert has its own three projections.
        path: the name of the module, for errors.
    """

    def __init__(
        self, plain: Experts, fmt: Format, *, is_stacked: bool, path: str, device: torch.device
    ) -> None:
        super().__init__()
        self._plain = [plain]  # in a list: it is not a part of this module
        self._device = device
        self._is_stacked = is_stacked
        self.num_bytes_dequantized = plain.gate_up.nbytes + plain.down.nbytes
        num_experts, hidden_size, size = plain.down.shape
        gate_up = {"gate_up_proj": 2 * size}
        if not is_stacked:
            gate_up = {"gate_proj": size, "up_proj": size}
        shapes = {part: (rows, hidden_size) for part, rows in gate_up.items()}
        shapes["down_proj"] = (hidden_size, size)
        self.stored = nn.ModuleDict(
            {
                part: StoredProjection(
                    fmt, *shape, path=f"{path}.{part}", device=device, count=num_experts
                )
                for part, shape in shapes.items()
            }
        )
        self.gate_up_bias = self._bias(plain.gate_up_bias)
        self.down_bias = self._bias(plain.down_bias)

    def _bias(self, plain: Tensor | None) -> nn.Parameter | None:
        if plain is None:
            return None
        return parameter(*plain.shape, dtype=plain.dtype, device=self._device)

    @property
    def plain(self) -> Experts:
        """The experts that it stands for, without memory."""
        return self._plain[0]

    def _part(self, name: str) -> StoredProjection:
        part = self.stored[name]
        assert isinstance(part, StoredProjection)
        return part

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        places: dict[str, Tensor] = {}
        for part in self.stored:
            for name, tensor in self._part(part).tensors.items():
                if self._is_stacked:
                    places[f"experts.{part}_{name}"] = tensor
                else:
                    places |= {f"experts.{i}.{part}.{name}": t for i, t in enumerate(tensor)}
        gate_up, down = self.gate_up_bias, self.down_bias
        if gate_up is None or down is None:
            return places
        if self._is_stacked:
            return {
                **places,
                "experts.gate_up_proj_bias": gate_up,
                "experts.down_proj_bias": down,
            }
        biases = {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
        for part, bias in biases.items():
            places |= {f"experts.{i}.{part}.bias": each for i, each in enumerate(bias)}
        return places

    def dequantized(self) -> Experts:
        """Return the experts with their weights.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        plain = self.plain.to_empty(device=self._device)
        if self._is_stacked:
            self._part("gate_up_proj").dequantize_to(plain.gate_up)
        else:
            self._part("gate_proj").dequantize_to(plain.gate_up[:, ::2])
            self._part("up_proj").dequantize_to(plain.gate_up[:, 1::2])
        self._part("down_proj").dequantize_to(plain.down)
        for own, bias in (
            (self.gate_up_bias, plain.gate_up_bias),
            (self.down_bias, plain.down_bias),
        ):
            if own is not None and bias is not None:
                bias.copy_(own)
        return plain
