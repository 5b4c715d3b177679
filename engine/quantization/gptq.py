"""GPTQ (Frantar et al., 2022): 4 or 8 bits, scales and zeros of groups of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields
from engine.layers.integer_weight import GroupedWeight, IntegerKind
from engine.layers.stored_weight import WNA16Weight, in_groups
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes, unpack
from kernels.quantized.codes import can_pack


@dataclass(frozen=True, slots=True)
class Gptq(Format):
    """Weights stored transposed, [in_features, out_features], consecutive inputs in a word.

    The group of an input is in `g_idx`.

    Attributes:
        group_size: inputs of a group; -1: all.
        zero_offset: what is to be added to stored zeros: 1 in the first version of the layout.
        desc_act: the groups may be of any inputs.
    """

    bits: int
    group_size: int
    zero_offset: int
    desc_act: bool

    @property
    def label(self) -> str:
        return f"gptq, {self.bits} bits"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        per_word = 32 // self.bits
        group_size = in_features if self.group_size == -1 else self.group_size
        if in_features % per_word or in_features % group_size or out_features % per_word:
            raise UnsupportedError(
                f"group_size {self.group_size} must divide the inputs, and {per_word} the inputs "
                f"and outputs, of a weight of {out_features} x {in_features} (outputs x inputs)",
                param="quantization_config",
            )
        groups = in_features // group_size
        # A rank has whole groups, and the scales of all.
        together = per_word if self.desc_act or groups == 1 else math.lcm(per_word, group_size)
        return {
            "qweight": Stored(
                (in_features // per_word, out_features),
                torch.int32,
                rows=Axis(1),
                columns=Axis(0, together, together // per_word),
            ),
            "qzeros": Stored((groups, out_features // per_word), torch.int32, Axis(1, per_word)),
            "scales": Stored((groups, out_features), torch.float32, Axis(1)),
            "g_idx": Stored((in_features,), torch.int32, columns=Axis(0)),
        }

    @property
    def has_any_order(self) -> bool:
        return self.desc_act

    def integer_kind(self, in_features: int) -> IntegerKind | None:
        if self.desc_act:
            return None
        return IntegerKind(self.bits, in_features if self.group_size == -1 else self.group_size)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        group, scales = self._groups(tensors), tensors["scales"]
        steps = unpack(tensors["qweight"], self.bits, 0)
        return ((steps - self._zeros(tensors)[group]) * scales[group]).t().contiguous()

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return can_pack(in_features if self.group_size == -1 else self.group_size)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        group = in_features if self.group_size == -1 else self.group_size
        order = 8 * in_features if self.desc_act else 0
        # A zero of 8 bits may be one of 16 beside the middle.
        shift = self.bits // 4
        return order + num_bytes_of_codes(out_features, in_features, self.bits, group, shift=shift)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight | None:
        group, scales, zeros = self._groups(tensors), tensors["scales"], self._zeros(tensors)
        if not self.desc_act:  # of a rank, those that are its
            first, last = int(group.min()), int(group.max())
            group, scales, zeros = group - first, scales[first : last + 1], zeros[first : last + 1]
        steps = unpack(tensors["qweight"], self.bits, 0).to(torch.uint8).t()
        return in_groups(steps, scales.t(), (-zeros * scales).t(), self.bits, group)

    def integers(self, tensors: Mapping[str, Tensor]) -> GroupedWeight | None:
        group, scales, zeros = self._groups(tensors), tensors["scales"], self._zeros(tensors)
        first, size = int(group[0]), len(group) if self.group_size == -1 else self.group_size
        in_order = torch.arange(len(group), device=group.device) // size + first
        if not torch.equal(group, in_order):
            return None
        own = slice(first, int(group[-1]) + 1)
        scales, zeros = scales[own], zeros[own]
        steps = unpack(tensors["qweight"], self.bits, 0).to(torch.uint8)
        is_symmetric = bool((zeros == 2 ** (self.bits - 1)).all())
        offset = None if is_symmetric else (-zeros * scales).t()
        return GroupedWeight(steps.t().contiguous(), scales.t(), offset, self.bits)

    def _groups(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the group of each input."""
        group, num_groups = tensors["g_idx"].long(), len(tensors["scales"])
        if not 0 <= int(group.min()) <= int(group.max()) < num_groups:
            raise CheckpointError(f"must be groups from 0 to {num_groups - 1}", param="g_idx")
        return group

    def _zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        zeros = unpack(tensors["qzeros"], self.bits, 1) + self.zero_offset
        zeros &= 2**self.bits - 1
        return zeros


def parse_gptq(config: Fields) -> Gptq:
    """Read a `quantization_config` whose method is gptq."""
    bits = config.integer("bits")
    if bits not in (4, 8):
        raise config.unsupported("bits", f"{bits} is not supported; only 4 and 8")
    if config.raw("dynamic"):
        raise config.unsupported("dynamic", "settings per module are not supported")
    if config.boolean("lm_head", default=False):
        raise config.unsupported("lm_head", "a quantised head is not supported")
    layout = config.text("checkpoint_format", default="gptq")
    if layout not in ("gptq", "gptq_v2"):
        raise config.unsupported(
            "checkpoint_format", f"{layout!r} is not supported; only 'gptq' and 'gptq_v2'"
        )
    group_size = config.integer("group_size", default=128, minimum=-1)
    if group_size == 0:
        raise config.error("group_size", "must be -1, or an integer above 0 (got 0)")
    return Gptq(
        bits,
        group_size,
        zero_offset=int(layout == "gptq"),
        desc_act=config.boolean("desc_act", default=False),
    )
