"""QuantizedExperts: the experts of a mixture as a quantised checkpoint stores them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from engine.layers.experts import Experts
from engine.layers.linear.linear import parameter
from engine.layers.stored_weight import Fp8Weight, WNA16Weight, stack_fp8, stack_wna16
from engine.models.tensor_names import ExpertTensors
from engine.quantization.format import Format
from engine.quantization.stored import Cut, StoredProjection, Window
from kernels.quantized.codes import Codes, stack


class QuantizedExperts(nn.Module):
    """The experts of a mixture, each projection in the tensors of its format.

    `engine.models.process_weights` replaces it after loading by what `dequantized` returns, in
    the linear method of its device.

    Attributes:
        num_bytes_dequantized: of the weights that it stands for.
        num_bytes_while_dequantized: that a CPU takes for the largest one in float32.

    Args:
        plain: of the same shape, without memory (on the meta device).
        windows: what this has of the weight of each projection, which is that of all experts.
        formats: of each projection.
        layout: as `TensorNames.experts`; gates and ups that are together alternate.
        path: the name of the module, for errors.
    """

    def __init__(
        self,
        plain: Experts,
        windows: Mapping[str, Window],
        formats: Mapping[str, Format],
        *,
        layout: ExpertTensors,
        path: str,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._plain = [plain]  # in a list: it is not a part of this module
        self._device = device
        self._layout = layout
        self.num_bytes_dequantized = plain.gate_up.nbytes + plain.down.nbytes
        self.stored = nn.ModuleDict(
            {
                part: StoredProjection(
                    formats[part],
                    window,
                    path=f"{path}.{part}",
                    device=device,
                    count=len(plain.down),
                )
                for part, window in windows.items()
            }
        )
        self.num_bytes_while_dequantized = 4 * max(
            self._part(name).num_weights for name in self.stored
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
        tensors: dict[str, Tensor] = {}
        for part in self.stored:
            for name, tensor in self._part(part).tensors.items():
                if self._layout == "gates and ups":
                    tensors[f"experts.{part}_{name}"] = tensor
                elif self._layout == "projection":
                    tensors[f"experts.{part}.{name}"] = tensor
                else:
                    tensors |= {f"experts.{i}.{part}.{name}": t for i, t in enumerate(tensor)}
        gate_up, down = self.gate_up_bias, self.down_bias
        if gate_up is None or down is None:
            return tensors
        if self._layout == "gates and ups":
            return {
                **tensors,
                "experts.gate_up_proj_bias": gate_up,
                "experts.down_proj_bias": down,
            }
        biases = {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
        for part, bias in biases.items():
            if self._layout == "projection":
                tensors[f"experts.{part}.bias"] = bias
                continue
            tensors |= {f"experts.{i}.{part}.bias": each for i, each in enumerate(bias)}
        return tensors

    def cuts(self) -> dict[str, Cut]:
        """Return which elements a rank has of the tensors that are cut, by the same names."""
        found: dict[str, Cut] = {}
        for part in self.stored:
            for name, cut in self._part(part).cuts.items():
                of_all = cut._replace(dim=cut.dim + 1)
                if self._layout == "gates and ups":
                    found[f"experts.{part}_{name}"] = of_all
                elif self._layout == "projection":
                    found[f"experts.{part}.{name}"] = of_all
                else:
                    count = range(len(self.plain.down))
                    found |= {f"experts.{i}.{part}.{name}": cut for i in count}
        return found

    @property
    def stays_on_gpu(self) -> bool:
        """Whether `for_gpu` returns weights, as far as it is known before they are read."""
        return all(self._part(name).stays_on_gpu for name in self.stored)

    @property
    def num_bytes_on_gpu(self) -> int:
        """The bytes of what `for_gpu` returns, at most."""
        return sum(self._part(name).num_bytes_on_gpu for name in self.stored)

    def for_gpu(self) -> tuple[Codes, Codes] | None:
        """Return gates, ups and downs as they are stored, for products on a GPU that widen them.

        Returns:
            Codes of all experts, [E, 2 * size, hidden_size], gates first, and [E, hidden_size,
            size]; None: there are no products of them.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        both: Iterable[Fp8Weight | WNA16Weight | None]
        if self._layout == "gates and ups":
            both = map(_gates_first, self._part("gate_up_proj").each_for_gpu())
        else:
            gates, ups = (self._part(f"{name}_proj").each_for_gpu() for name in ("gate", "up"))
            both = (_stacked(*pair) for pair in zip(gates, ups, strict=True))
        gate_up, down = (_codes(each) for each in (both, self._part("down_proj").each_for_gpu()))
        return None if gate_up is None or down is None else (gate_up, down)

    def dequantized(self) -> Experts:
        """Return the experts with their weights.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        plain = self.plain.to_empty(device=self._device)
        if self._layout == "gates and ups":
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


def _codes(experts: Iterable[Fp8Weight | WNA16Weight | None]) -> Codes | None:
    """Return the codes of all experts; None: there are none of one."""
    packed: list[Codes] = []
    for weight in experts:  # the weight of one at a time is not packed
        if weight is None or (isinstance(weight, WNA16Weight) and weight.order is not None):
            return None
        packed.append(weight.packed())
    return stack(packed)


def _stacked(
    gate: Fp8Weight | WNA16Weight | None, up: Fp8Weight | WNA16Weight | None
) -> Fp8Weight | WNA16Weight | None:
    if isinstance(gate, Fp8Weight) and isinstance(up, Fp8Weight):
        return stack_fp8([gate, up])
    if isinstance(gate, WNA16Weight) and isinstance(up, WNA16Weight):
        return stack_wna16([gate, up])
    return None


def _gates_first(weight: Fp8Weight | WNA16Weight | None) -> Fp8Weight | WNA16Weight | None:
    """Return a weight whose rows, gates and ups, alternate, with all gates before the ups."""
    if not isinstance(weight, WNA16Weight) or len(weight.scale) < len(weight.steps):
        return None  # scales of blocks of rows are of both
    return _stacked(*(weight.rows(slice(first, None, 2)) for first in range(2)))
