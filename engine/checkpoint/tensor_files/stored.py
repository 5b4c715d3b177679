"""StoredTensor: where a tensor of a checkpoint lies, and of which type it is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.gguf.reader import block_size
from engine.checkpoint.lfs import unreadable

# Header dtypes that can be loaded; others require a quantised model.
FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
# Those of quantised checkpoints, whose tensors have no other type.
_EXACT = {
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPES = {**FLOATS, **_EXACT}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint, as described by its file's header."""

    name: str
    file: Path
    offset: int  # of its first byte in the file
    shape: tuple[int, ...]
    type_name: str
    is_gguf: bool = False

    @property
    def is_in_blocks(self) -> bool:
        """Whether it consists of a GGUF's blocks, which are read as float32."""
        return self.is_gguf and self.type_name not in DTYPES

    @property
    def is_float(self) -> bool:
        return self.type_name in FLOATS or self.is_in_blocks

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its elements. Its type must be one of `DTYPES`, or of a GGUF's blocks."""
        return torch.float32 if self.is_in_blocks else DTYPES[self.type_name]

    @property
    def num_elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        return self.bytes_of(self.num_elements)

    def bytes_of(self, num_elements: int) -> int:
        """Return the bytes that elements take in the file; of blocks only whole ones do."""
        if not self.is_in_blocks:
            return num_elements * self.dtype.itemsize
        block, num_bytes = block_size(self.type_name)
        assert num_elements % block == 0, f"{num_elements} elements are no blocks of {block}"
        return num_elements // block * num_bytes

    def as_stored(self, dtype: torch.dtype) -> StoredTensor:
        """Return it, or of a GGUF the bytes of its rows if `dtype` is uint8."""
        if not (self.is_gguf and dtype == torch.uint8):
            return self
        *rows, length = self.shape
        return replace(self, shape=(*rows, self.bytes_of(length)), type_name="U8")

    @property
    def described_by(self) -> str:
        """The file that defines which shape and type it must have."""
        return "its metadata" if self.is_gguf else "config.json"


def read_file(file: Path) -> Iterator[StoredTensor]:
    """Yield the tensors of a safetensors file.

    Raises:
        CheckpointError: it is missing, corrupt or shorter than in its header.
    """
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # the header is valid, and the file has exactly the size that it implies
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        text = f"corrupt or truncated safetensors file: {error}"
        raise unreadable(file, text) from None
    for name, fields in header.items():
        if name != "__metadata__":
            offset = 8 + length + fields["data_offsets"][0]
            yield StoredTensor(name, file, offset, tuple(fields["shape"]), fields["dtype"])
