"""QuantizedLinear: a linear as a quantised checkpoint stores it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from engine.layers.integer_weight import IntegerKind, IntegerWeight, common_kind, stack
from engine.layers.linear.linear import Linear, parameter
from engine.layers.stored_weight import (
    Fp8Weight,
    WNA16Weight,
    of_integers,
    stack_fp8,
    stack_wna16,
)
from engine.quantization.format import Format, num_bytes_of_codes
from engine.quantization.stored import Cut, StoredProjection, Window


class QuantizedLinear(nn.Module):
    """A projection, or several stacked ones, as a quantised checkpoint stores them.

    `engine.models.process_weights` replaces it after loading: by a GEMM of 8-bit integers, or by
    what `dequantized` returns, in the linear method of its device.

    Attributes:
        bias: as it is stored; `ordered_bias` is that of the weight.
        device: of its tensors.
        num_bytes_dequantized: of the weight that it stands for.
        num_bytes_while_dequantized: that a CPU takes for its largest part in float32; a rank may
            have to compute more than it keeps.

    Args:
        plain: of the same shape, without memory (on the meta device).
        windows: name of each projection in the checkpoint -> what this is of its weight.
        formats: of each projection.
        names: of each projection in the checkpoint, for errors.
    """

    def __init__(
        self,
        plain: Linear,
        windows: Mapping[str, Window],
        formats: Mapping[str, Format],
        *,
        names: Mapping[str, str],
        device: torch.device,
    ) -> None:
        super().__init__()
        self._plain = [plain]  # in a list: it is not a part of this module
        self.device = device
        self.num_bytes_dequantized = plain.weight.nbytes
        self.stored = nn.ModuleDict(
            {
                part: StoredProjection(formats[part], window, path=names[part], device=device)
                for part, window in windows.items()
            }
        )
        parts = self._parts().values()
        self.num_bytes_while_dequantized = 4 * max(part.num_weights for part in parts)
        self._sizes = [window.num_rows for window in windows.values()]
        self.bias: nn.Parameter | None = None
        if plain.bias is not None:
            self.bias = parameter(len(plain.bias), dtype=plain.bias.dtype, device=device)

    @property
    def plain(self) -> Linear:
        """The projection that it stands for, without memory."""
        return self._plain[0]

    def _parts(self) -> dict[str, StoredProjection]:
        found: dict[str, StoredProjection] = {}
        for name, part in self.stored.items():
            assert isinstance(part, StoredProjection)
            found[name] = part
        return found

    @property
    def ordered_bias(self) -> Tensor | None:
        """The bias in the order of the weight's rows, once it is read."""
        if self.bias is None:
            return None
        parts = zip(self._parts().values(), torch.split(self.bias, self._sizes), strict=True)
        return torch.cat([part.in_order(bias) for part, bias in parts])

    def destinations(self) -> dict[str, Tensor]:
        """Return where each tensor of the checkpoint goes, by its name beside this module."""
        parts = self._parts()
        tensors: dict[str, Tensor] = {
            f"{part}.{name}": tensor
            for part, projection in parts.items()
            for name, tensor in projection.tensors.items()
        }
        if self.bias is not None:
            biases = torch.split(self.bias, self._sizes)
            tensors |= {f"{part}.bias": bias for part, bias in zip(parts, biases, strict=True)}
        return tensors

    def cuts(self) -> dict[str, Cut]:
        """Return which elements a rank has of the tensors that are cut, by the same names."""
        return {
            f"{part}.{name}": cut
            for part, projection in self._parts().items()
            for name, cut in projection.cuts.items()
        }

    def dequantized(self) -> Linear:
        """Return the projection with its weight.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        plain = self.plain.to_empty(device=self.device)
        weights = torch.split(plain.weight, self._sizes)
        for projection, weight in zip(self._parts().values(), weights, strict=True):
            projection.dequantize_to(weight)
        if (bias := self.ordered_bias) is not None:
            assert plain.bias is not None
            plain.bias.copy_(bias)
        return plain

    @property
    def integer_kind(self) -> IntegerKind | None:
        """What `integers` returns, as far as it is known before the weights are read."""
        kinds = [part.integer_kind for part in self._parts().values()]
        known = [kind for kind in kinds if kind is not None]
        return common_kind(known) if len(known) == len(kinds) else None

    @property
    def stays_on_gpu(self) -> bool:
        """Whether `for_gpu` returns a weight, as far as it is known before the weights are read."""
        return all(part.stays_on_gpu for part in self._parts().values())

    @property
    def num_bytes_on_gpu(self) -> int:
        """The bytes of the weight that `for_gpu` returns, at most, as codes."""
        parts = self._parts().values()
        kind = self.integer_kind
        if kind is None or len({part.integer_kind for part in parts}) == 1:
            return sum(part.num_bytes_on_gpu for part in parts)
        rows, columns = self.plain.weight.shape  # in the most bits of them
        group = kind.group_size or columns
        return num_bytes_of_codes(rows, columns, kind.bits, group, shift=2)

    def for_gpu(self) -> Fp8Weight | WNA16Weight | None:
        """Return the weight as it is stored, for products on a GPU; None: there are none of it.

        Raises:
            CheckpointError: a scale is not finite or 0, or an index is out of range.
        """
        parts = [each.for_gpu() for each in self._parts().values()]
        in_fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        wna16 = [part for part in parts if isinstance(part, WNA16Weight)]
        if len(in_fp8) == len(parts):
            return stack_fp8(in_fp8)
        stacked = stack_wna16(wna16) if len(wna16) == len(parts) else None
        if stacked is None and (integers := self.integers()) is not None:
            return of_integers(integers)  # of several kinds
        return stacked

    def integers(self) -> IntegerWeight | None:
        """Return the weight as integers, where all of it is stored so.

        Raises:
            CheckpointError: a scale is not finite or 0.
        """
        parts = [each.integers() for each in self._parts().values()]
        stored = [part for part in parts if part is not None]
        return stack(stored) if len(stored) == len(parts) else None
