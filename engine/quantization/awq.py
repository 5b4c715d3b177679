"""AWQ (Lin et al., 2023) in its GEMM layout: 4 bits, scales and zeros of groups of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import UnsupportedError
from engine.fields import Fields
from engine.layers.integer_weight import GroupedWeight, IntegerKind
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes, unpack

_BITS = 4
_PER_WORD = 32 // _BITS
# Which of the eight output channels of a word its bits hold, lowest first.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class Awq(Format):
    """Weights stored transposed, [in_features, out_features], eight channels to a word."""

    group_size: int

    @property
    def label(self) -> str:
        return f"awq, groups of {self.group_size}"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        if in_features % self.group_size or out_features % _PER_WORD:
            raise UnsupportedError(
                f"group_size {self.group_size} must divide the inputs, and {_PER_WORD} the "
                f"outputs, of a weight of {out_features} x {in_features} (outputs x inputs)",
                param="quantization_config",
            )
        groups, words = in_features // self.group_size, out_features // _PER_WORD
        channels, of_groups = Axis(1, _PER_WORD), Axis(0, self.group_size)
        return {
            "qweight": Stored((in_features, words), torch.int32, channels, Axis(0)),
            "qzeros": Stored((groups, words), torch.int32, channels, of_groups),
            "scales": Stored((groups, out_features), torch.float32, Axis(1), of_groups),
        }

    def integer_kind(self, in_features: int) -> IntegerKind:
        return IntegerKind(_BITS, self.group_size)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        steps, zeros = (_channels(tensors[name]) for name in ("qweight", "qzeros"))
        zeros, scales = (
            each.repeat_interleave(self.group_size, 0) for each in (zeros, tensors["scales"])
        )
        return ((steps - zeros) * scales).t().contiguous()

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        return num_bytes_of_codes(out_features, in_features, _BITS, self.group_size, shift=1)

    def integers(self, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        steps, zeros = (_channels(tensors[name]) for name in ("qweight", "qzeros"))
        scales = tensors["scales"]
        return GroupedWeight(
            steps.to(torch.uint8).t().contiguous(), scales.t(), (-zeros * scales).t(), _BITS
        )


def parse_awq(config: Fields) -> Awq:
    """Read a `quantization_config` whose method is awq."""
    bits = config.integer("bits", default=config.integer("w_bit", default=_BITS))
    if bits != _BITS:
        raise config.unsupported("bits", f"{bits} is not supported; only {_BITS}")
    version = config.text("version", default="gemm").lower()
    if version != "gemm":
        raise config.unsupported("version", f"{version!r} is not supported; only 'gemm'")
    if not config.boolean("zero_point", default=True):
        raise config.unsupported("zero_point", "false is not supported")
    group_size = config.integer("group_size", default=config.integer("q_group_size", default=128))
    return Awq(group_size)


def _channels(packed: Tensor) -> Tensor:
    """Return [rows, channels] of [rows, words], in the order of the channels."""
    values = unpack(packed, _BITS, 1).view(len(packed), -1, _PER_WORD)
    order = torch.tensor(_ORDER, device=packed.device).argsort()
    return values[..., order].flatten(1)
