"""GGUF: blocks of integers with their scales, in a type of its own for each tensor.

The package `gguf` knows the types: https://github.com/ggml-org/llama.cpp/tree/master/gguf-py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoint.gguf.blocks import dequantize_blocks
from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import GgufFile, block_size, read_gguf
from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields
from engine.layers.integer_weight import GroupedWeight, IntegerKind
from engine.layers.stored_weight import Fp8Weight, WNA16Weight
from engine.quantization.format import (
    Axis,
    Format,
    QuantizedCheckpoint,
    Stored,
    num_bytes_of_codes,
)
from engine.quantization.gguf_integers import grouped_weight, integer_kind
from engine.quantization.mxfp4 import e2m1_weight

_BYTES = torch.uint8
_MXFP4 = "MXFP4"  # which has products on a GPU as it is
# The head; a file without one has it in the embedding.
_HEADS = ("output", "token_embd")
# Architectures whose queries and keys are rotated in pairs of neighbours: their rows alternate
# between the halves of a head.
_IN_PAIRS = ("llama", "mistral3")


@dataclass(frozen=True, slots=True)
class GgufBlocks(Format):
    """Rows of blocks, as bytes.

    Attributes:
        type_name: of the blocks; also F32, F16 and BF16.
        head_dim: of a projection whose rows alternate between the halves of each head; or None.
    """

    type_name: str
    head_dim: int | None = None

    @property
    def label(self) -> str:
        return f"gguf, {self.type_name}"

    def tensors(self, out_features: int, in_features: int) -> dict[str, Stored]:
        num_elements, num_bytes = block_size(self.type_name)
        if in_features % num_elements:
            raise UnsupportedError(
                f"in_features {in_features} is not a multiple of the block size "
                f"{num_elements} of {self.type_name}",
                param="config.json",
            )
        shape = (out_features, in_features // num_elements * num_bytes)
        rows, columns = Axis(0, self.head_dim or 1), Axis(1, num_elements, num_bytes)
        if self.head_dim is not None:
            rows = rows._replace(elements=self.head_dim)
        return {"weight": Stored(shape, _BYTES, rows, columns)}

    def integer_kind(self, in_features: int) -> IntegerKind | None:
        return integer_kind(self.type_name)

    def dequantize(self, tensors: Mapping[str, Tensor]) -> Tensor:
        weight = dequantize_blocks(tensors["weight"], self.type_name)
        return self.in_order(_finite(weight))

    def integers(self, tensors: Mapping[str, Tensor]) -> GroupedWeight | None:
        if integer_kind(self.type_name) is None:
            return None
        weight = grouped_weight(tensors["weight"], self.type_name)
        steps, scale, offset = (
            None if each is None else self.in_order(each) for each in weight[:3]
        )
        assert steps is not None
        assert scale is not None
        if offset is not None:
            _finite(offset)
        return GroupedWeight(steps, _finite(scale), offset, weight.bits)

    def num_bytes_on_gpu(self, out_features: int, in_features: int) -> int:
        if self.type_name == _MXFP4:
            group, _ = block_size(_MXFP4)
            return num_bytes_of_codes(out_features, in_features, 4, group, scale=1)
        return Format.num_bytes_on_gpu(self, out_features, in_features)

    def for_gpu(self, tensors: Mapping[str, Tensor]) -> Fp8Weight | WNA16Weight | None:
        if self.type_name != _MXFP4:
            return Format.for_gpu(self, tensors)
        blocks = tensors["weight"]
        blocks = blocks.view(len(blocks), -1, block_size(_MXFP4)[1])
        # An exponent, then codes: those of the first half of the block in low bits.
        codes = torch.cat((blocks[..., 1:] & 15, blocks[..., 1:] >> 4), -1)
        return e2m1_weight(self.in_order(codes.flatten(1)), self.in_order(blocks[..., 0]))

    def in_order(self, rows: Tensor) -> Tensor:
        """Return the rows with the halves of each head one after the other."""
        if self.head_dim is None:
            return rows
        pairs = rows.view(-1, self.head_dim // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _finite(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise CheckpointError("a scale is not finite", param="weight")
    return values


@dataclass(frozen=True, slots=True)
class GgufCheckpoint(QuantizedCheckpoint):
    """The projections of a GGUF file."""

    file: GgufFile
    num_heads: int
    num_kv_heads: int

    @property
    def label(self) -> str:
        types = {tensor.type_name for tensor in self.file.tensors.values() if len(tensor.shape) > 1}
        return f"gguf, {', '.join(sorted(types))}"

    def tensor_names(self) -> Collection[str]:
        return self.file.tensors

    def head(self, rows: slice) -> GroupedWeight | None:
        names = [f"{name}.weight" for name in _HEADS if f"{name}.weight" in self.file.tensors]
        tensor = self.file.tensors[names[0]]
        path = tensor.file
        try:
            read = np.fromfile(path, np.uint8, tensor.num_bytes, offset=tensor.offset)
            blocks = torch.from_numpy(read).view(tensor.shape[0], -1)
            return GgufBlocks(tensor.type_name).integers({"weight": blocks[rows]})
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", param=str(path)) from None
        except CheckpointError as error:
            raise error.reworded(error.message, param=f"{path.name}: {tensor.name}") from None

    def format_of(self, module: str, *, is_expert: bool) -> Format | None:
        name = f"{module}.weight"
        if name not in self.file.tensors:
            raise CheckpointError(f"missing from {self.file.path.name}", param=name)
        tensor, head_dim = self.file.tensors[name], None
        if self.file.metadata["general.architecture"] in _IN_PAIRS:
            heads = {"attn_q": self.num_heads, "attn_k": self.num_kv_heads}
            num_heads = heads.get(module.rpartition(".")[2])
            head_dim = None if num_heads is None else tensor.shape[0] // num_heads
        return GgufBlocks(tensor.type_name, head_dim)


def read_gguf_checkpoint(folder: Path, config: Fields) -> GgufCheckpoint:
    """Read how the GGUF file that `folder` stands for stores its projections.

    Raises:
        CheckpointError: the file is broken.
    """
    num_heads, num_kv_heads = (
        config.integer("num_attention_heads"),
        config.integer("num_key_value_heads"),
    )
    return GgufCheckpoint(read_gguf((folder / GGUF).readlink()), num_heads, num_kv_heads)
