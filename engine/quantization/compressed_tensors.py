"""compressed-tensors, the format of llm-compressor: FP8, NVFP4, and integers of 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields
from engine.layers.integer_weight import GroupedWeight, Int8Weight, IntegerKind
from engine.layers.stored_weight import WNA16Weight, in_groups
from engine.quantization.format import Axis, Format, Stored, num_bytes_of_codes, unpack
from engine.quantization.fp8 import Fp8
from engine.quantization.nvfp4 import Nvfp4
from kernels.quantized.codes import can_pack


@dataclass(frozen=True, slots=True)
class Int8Channels(Format):
    """8-bit integers with a scale per output channel, or one for all (`int-quantized`)."""

    per_channel: bool
    has_input_scale: bool

    @property
    def label(self) -> str:
        return "compressed-tensors, int8"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        scales = Stored((1,), torch.float32)
        if self.per_channel:
            scales = Stored((out_features, 1), torch.float32, Axis(0))
        stored = {
            "weight": Stored((out_features, in_features), torch.int8, Axis(0), Axis(1)),
            "weight_scale": scales,
        }
        if self.has_input_scale:
            stored["input_scale"] = Stored((1,), torch.float32)
        return stored

    def integer_kind(self, in_features: int) -> IntegerKind:
        return IntegerKind(8, None)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        return num_bytes_of_codes(out_features, in_features, 8, in_features)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors["weight"].float() * tensors["weight_scale"]

    def integers(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        steps = tensors["weight"]
        return Int8Weight(steps, tensors["weight_scale"].flatten().expand(len(steps)))


@dataclass(frozen=True, slots=True)
class PackedGroups(Format):
    """Integers of 4 or 8 bits, consecutive inputs in a word (`pack-quantized`).

    Attributes:
        group_size: inputs that share a scale; None: all of a channel.
        has_group_index: the group of each input is stored, so that groups may be of any inputs.
        has_zeros: a zero of each group is stored, consecutive outputs in a word.
    """

    bits: int
    group_size: int | None
    has_group_index: bool
    has_zeros: bool

    @property
    def label(self) -> str:
        return f"compressed-tensors, {self.bits} bits"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        per_word, group_size = 32 // self.bits, self.group_size or in_features
        if in_features % per_word or in_features % group_size:
            raise UnsupportedError(
                f"group_size {group_size} and {per_word} must divide the inputs of a weight of "
                f"{out_features} x {in_features} (outputs x inputs)",
                param="quantization_config",
            )
        groups, rows = in_features // group_size, Axis(0)
        of_groups = Axis(1, group_size) if groups > 1 and not self.has_group_index else None
        stored = {
            "weight_packed": Stored(
                (out_features, in_features // per_word), torch.int32, rows, Axis(1, per_word)
            ),
            "weight_scale": Stored((out_features, groups), torch.float32, rows, of_groups),
            "weight_shape": Stored((2,), torch.int64, is_shape=True),
        }
        if self.has_zeros:
            words = (-(-out_features // per_word), groups)
            stored["weight_zero_point"] = Stored(words, torch.int32, Axis(0, per_word), of_groups)
        if self.has_group_index:
            stored["weight_g_idx"] = Stored((in_features,), torch.int32, columns=Axis(0))
        return stored

    @property
    def has_any_order(self) -> bool:
        return self.has_group_index

    def integer_kind(self, in_features: int) -> IntegerKind | None:
        if self.has_group_index:
            return None
        return IntegerKind(self.bits, self.group_size or in_features)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        steps, scales = self._steps(tensors), tensors["weight_scale"]
        group = self._groups(tensors, steps.shape[1])
        return (steps - self._zeros(tensors)[:, group]) * scales[:, group]

    def integers(self, tensors: Mapping[str, Tensor]) -> GroupedWeight | None:
        if self.has_group_index:
            return None
        steps, scales = self._steps(tensors).to(torch.uint8), tensors["weight_scale"]
        offset = -self._zeros(tensors) * scales if self.has_zeros else None
        return GroupedWeight(steps, scales, offset, self.bits)

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return can_pack(self.group_size or in_features)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        order = 8 * in_features if self.has_group_index else 0
        shift = self.bits // 4 if self.has_zeros else 0  # of 8 bits it may be one of 16
        return order + num_bytes_of_codes(
            out_features, in_features, self.bits, self.group_size or in_features, shift=shift
        )

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight | None:
        steps, scales = self._steps(tensors).to(torch.uint8), tensors["weight_scale"]
        group = self._groups(tensors, steps.shape[1])
        return in_groups(steps, scales, -self._zeros(tensors) * scales, self.bits, group)

    def _steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the integers [N, K] from 0 on, int32."""
        return unpack(tensors["weight_packed"], self.bits, 1)

    def _zeros(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the integers that stand for 0, [N, groups]."""
        scales = tensors["weight_scale"]
        if self.has_zeros:
            return unpack(tensors["weight_zero_point"], self.bits, 0)[: len(scales)]
        zero = torch.tensor(2 ** (self.bits - 1), dtype=torch.int32, device=scales.device)
        return zero.expand(scales.shape)

    def _groups(self, tensors: Mapping[str, Tensor], num_inputs: int) -> Tensor:
        """Return the group of each input."""
        scales = tensors["weight_scale"]
        num_groups = scales.shape[1]
        if not self.has_group_index:
            return torch.arange(num_inputs, device=scales.device) * num_groups // num_inputs
        group = tensors["weight_g_idx"].long()
        if not 0 <= int(group.min()) <= int(group.max()) < num_groups:
            raise CheckpointError(
                f"must be groups from 0 to {num_groups - 1}", param="weight_g_idx"
            )
        return group


def parse_compressed_tensors(config: Fields) -> Format:
    """Read a `quantization_config` whose method is compressed-tensors."""
    groups = config.child("config_groups")
    if groups is None or len(groups.names()) != 1:
        raise config.unsupported("config_groups", "must have exactly one group")
    group = groups.child(groups.names()[0])
    weights = None if group is None else group.child("weights")
    if group is None or weights is None:
        raise groups.error(groups.names()[0], "has no weights")
    if group.texts("targets") != ["Linear"]:
        raise group.unsupported("targets", 'only ["Linear"] is supported')
    has_zeros = not weights.boolean("symmetric", default=True)
    inputs = group.child("input_activations")
    is_static = inputs is not None and inputs.raw("dynamic") is False
    kind, bits = weights.text("type", default="int"), weights.integer("num_bits", default=8)
    strategy, layout = weights.text("strategy"), config.text("format", default="dense")
    per_channel = strategy == "channel"
    if has_zeros and layout != "pack-quantized":
        raise weights.unsupported("symmetric", f"false is not supported with {layout}")
    match layout, kind, bits, strategy:
        case "float-quantized" | "naive-quantized", "float", 8, "channel" | "tensor":
            input_scale_name = "input_scale" if is_static else None
            return Fp8("weight_scale", None, per_channel, input_scale_name)
        case "float-quantized" | "naive-quantized", "float", 8, "block":
            rows, columns = _block(weights)
            return Fp8("weight_scale", (rows, columns))
        case "int-quantized" | "naive-quantized", "int", 8, "channel" | "tensor":
            return Int8Channels(per_channel, is_static)
        case "nvfp4-pack-quantized", "float", 4, "tensor_group":
            has_scale = inputs is not None and inputs.raw("dynamic") is not True
            input_name = "input_global_scale" if has_scale else None
            return Nvfp4("weight_packed", "weight_global_scale", input_name, divides=True)
        case "pack-quantized", "int", 4 | 8, "group" | "channel":
            size = weights.integer("group_size", default=None)
            has_index = weights.raw("actorder") in ("group", "dynamic")  # two names of one order
            return PackedGroups(bits, None if per_channel else size, has_index, has_zeros)
    raise config.unsupported(
        "format", f"{layout!r} with {kind} weights of {bits} bits per {strategy} is not supported"
    )


def _block(weights: Fields) -> tuple[int, int]:
    block = weights.integers("block_structure")
    if len(block) != 2 or min(block) < 1:
        raise weights.error("block_structure", "must be two integers above 0")
    return block[0], block[1]
