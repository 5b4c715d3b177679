"""NF4 and FP4 (QLoRA, Dettmers et al., 2023): 4 bits into a table of 16, with scales of blocks.

The layout of bitsandbytes with `load_in_4bit`. The state of a projection is in a tensor of
JSON beside it: https://github.com/bitsandbytes-foundation/bitsandbytes (`QuantState.as_dict`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.tensor_files.elements import read_tensor
from engine.checkpoint.tensor_files.headers import read_headers, where_missing
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields, parse_json_object
from engine.layers.stored_weight import WNA16Weight
from engine.quantization.format import (
    Format,
    QuantizedCheckpoint,
    Stored,
    num_bytes_of_codes,
)
from engine.quantization.ignored import is_ignored
from kernels.quantized.codes import can_pack

_TYPES = ("nf4", "fp4")
_STATE = "weight.quant_state.bitsandbytes__"
# Scales are 0 of blocks of zeros.
_MAY_BE_ZERO = (
    *("weight.quant_map", "weight.nested_quant_map"),
    *("weight.absmax", "weight.nested_absmax"),
)


@dataclass(frozen=True, slots=True)
class FourBit(Format):
    """Indices of a table, the first of each byte in its high bits, in rows one after the other.

    Attributes:
        state_name, state_size: of the tensor of JSON.
        shape: of the weight, as in that.
        block: weights that share a scale; a block may begin in a row and end in the next.
        nested_block: scales that share one of their own, which are bytes then, indices of a table
            of 256; None: they are floats.
        offset: added to such scales.
    """

    state_name: str
    state_size: int
    shape: tuple[int, ...]
    block: int
    nested_block: int | None
    offset: float

    @property
    def label(self) -> str:
        return f"bitsandbytes, {self.state_name.removeprefix(_STATE)}"

    @property
    def may_be_zero(self) -> frozenset[str]:
        return frozenset(_MAY_BE_ZERO)

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        if self.shape != (out_features, in_features):
            raise CheckpointError(
                f"is {list(self.shape)}, but config.json asks for {[out_features, in_features]}",
                param=f"{self.state_name}: shape",
            )
        num_blocks = -(-out_features * in_features // self.block)
        scales = torch.float32 if self.nested_block is None else torch.uint8
        stored = {
            "weight": Stored((-(-out_features * in_features // 2), 1), torch.uint8),
            "weight.absmax": Stored((num_blocks,), scales),
            "weight.quant_map": Stored((16,), torch.float32),
            self.state_name: Stored((self.state_size,), torch.uint8),
        }
        if self.nested_block is not None:
            num_scales = -(-num_blocks // self.nested_block)
            stored["weight.nested_absmax"] = Stored((num_scales,), torch.float32)
            stored["weight.nested_quant_map"] = Stored((256,), torch.float32)
        return stored

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        steps = self._steps(tensors)
        weight = tensors["weight.quant_map"][steps.int()].flatten()
        weight *= self._scales(tensors).repeat_interleave(self.block)[: weight.numel()]
        return weight.view(self.shape)

    def stays_on_gpu(self, out_features: int, in_features: int) -> bool:
        return can_pack(self.block) and in_features % self.block == 0

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        table = 16 * 4
        return table + num_bytes_of_codes(out_features, in_features, 4, self.block)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> WNA16Weight | None:
        if self.shape[1] % self.block:
            return None  # a block is of two rows
        scale = self._scales(tensors).view(self.shape[0], -1)
        return WNA16Weight(self._steps(tensors), "table4", scale, table=tensors["weight.quant_map"])

    def _scales(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the scales of blocks."""
        scale = tensors["weight.absmax"]
        if self.nested_block is not None:
            shared = tensors["weight.nested_absmax"].repeat_interleave(self.nested_block)
            table = tensors["weight.nested_quant_map"]
            scale = table[scale.int()] * shared[: len(scale)] + self.offset
        return scale

    def _steps(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the indices of the table, uint8."""
        packed = tensors["weight"].flatten()
        indices = torch.stack((packed >> 4, packed & 15), -1).flatten()
        rows, columns = self.shape
        return indices[: rows * columns].view(rows, columns)


@dataclass(frozen=True, slots=True)
class FourBitCheckpoint(QuantizedCheckpoint):
    """A checkpoint whose projections are stored so, each with a state of its own.

    Attributes:
        stored: all its tensors.
        formats: by the name of the projection.
        ignored: patterns of the names of modules that are floats.
    """

    stored: Mapping[str, StoredTensor]
    formats: Mapping[str, FourBit]
    ignored: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(sorted({fmt.label for fmt in self.formats.values()}))

    def tensor_names(self) -> Collection[str]:
        return self.stored

    def format_of(self, module: str, *, is_expert: bool) -> Format | None:
        if is_ignored(module, self.ignored):
            return None
        if is_expert:
            raise UnsupportedError(
                f"experts are not supported ({module})", param="quantization_config: load_in_4bit"
            )
        if module not in self.formats:
            names = " or ".join(f"{module}.{_STATE}{kind}" for kind in _TYPES)
            raise CheckpointError(f"missing from {where_missing(self.stored)}", param=names)
        return self.formats[module]


def is_4_bit(config: Fields) -> bool:
    """Return whether a `quantization_config` is one of 4 bits of bitsandbytes."""
    is_ours = config.raw("quant_method") == "bitsandbytes"
    return is_ours and config.boolean("load_in_4bit", default=False)


def read_4_bit_checkpoint(
    folder: Path, config: Fields, ignored: tuple[str, ...]
) -> FourBitCheckpoint:
    """Read how the checkpoint in `folder` stores its projections.

    Raises:
        UnsupportedError: its bytes are stored as another type.
        CheckpointError: a file is broken, or a state is.
    """
    storage = config.text("bnb_4bit_quant_storage", default="uint8")
    if storage != "uint8":
        raise config.unsupported("bnb_4bit_quant_storage", f"{storage!r} is not supported")
    stored = read_headers(folder)
    formats = {
        name.partition(f".{_STATE}")[0]: _format(tensor)
        for name, tensor in stored.items()
        if _STATE in name
    }
    return FourBitCheckpoint(stored, formats, ignored)


def _format(tensor: StoredTensor) -> FourBit:
    """Return the format that a tensor of JSON describes."""
    name, where = tensor.name, f"{tensor.file.name}: {tensor.name}"
    if tensor.type_name != "U8":
        raise CheckpointError(f"must be of uint8 (got dtype {tensor.type_name})", param=where)
    content = bytes(read_tensor(tensor).tolist())
    fields = Fields(parse_json_object(content, where), name=where)
    kind = fields.text("quant_type")
    if kind not in _TYPES:
        raise fields.unsupported("quant_type", f"{kind!r} is not supported; only nf4 and fp4")
    nested = fields.integer("nested_blocksize", default=None)
    return FourBit(
        state_name=name[name.index(_STATE) :],
        state_size=tensor.num_elements,
        shape=fields.integers("shape"),
        block=fields.integer("blocksize"),
        nested_block=nested,
        offset=0.0 if nested is None else fields.number("nested_offset", or_zero=True),
    )
