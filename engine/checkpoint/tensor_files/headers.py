"""Headers of a checkpoint's files, safetensors or GGUF: the location of each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import block_size, read_gguf
from engine.errors import CheckpointError
from engine.fields import Fields, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

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
        """What says which shape and type it must have."""
        return "its metadata" if self.is_gguf else "config.json"


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint folder, by name.

    Raises:
        CheckpointError: a file is missing, corrupt or shorter than its header says, or the files
            contradict the index.
    """
    if (path / GGUF).exists():
        return _gguf_tensors((path / GGUF).readlink())  # errors name the file that is linked to
    stored: dict[str, StoredTensor] = {}
    for file, promised in _shards(path).items():
        found = {tensor.name: tensor for tensor in _tensors(file)}
        for name in promised:
            if name not in found:
                raise CheckpointError(f"{name}: {INDEX} says {file.name}, which lacks it")
        for name, tensor in found.items():
            if name in stored:
                raise CheckpointError(
                    f"{name}: found in both {stored[name].file.name} and {file.name}"
                )
            stored[name] = tensor
    return stored


def where_missing(stored: Mapping[str, StoredTensor]) -> str:
    """Return the file that would hold, or name, a tensor that is not among `stored`, all there are.

    Of several files that is their index, or the parts of a GGUF.
    """
    first, *others = sorted({tensor.file.name for tensor in stored.values()})
    if any(tensor.is_gguf for tensor in stored.values()):
        return f"{first} and the other parts" if others else first
    return INDEX if others else first


def _tensors(file: Path) -> Iterator[StoredTensor]:
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # the header is valid, and the file has exactly the size that it implies
        with file.open("rb") as content:
            length = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(length))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: corrupt or truncated safetensors file: {error}") from None
    for name, fields in header.items():
        if name != "__metadata__":
            offset = 8 + length + fields["data_offsets"][0]
            yield StoredTensor(name, file, offset, tuple(fields["shape"]), fields["dtype"])


def _gguf_tensors(file: Path) -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(
            name, tensor.file, tensor.offset, tensor.shape, tensor.type_name, is_gguf=True
        )
        for name, tensor in read_gguf(file).tensors.items()
    }


def _shards(path: Path) -> dict[Path, list[str]]:
    """Return the checkpoint's files, each with the tensors that the index assigns to it."""
    if (path / SINGLE).is_file():
        return {path / SINGLE: []}
    if not (path / INDEX).is_file():
        raise _no_weights(path)
    index = Fields(read_json_object(path / INDEX), name=INDEX)
    weight_map = index.child("weight_map")
    if weight_map is None:
        raise index.error("weight_map", "is missing")
    shards: dict[Path, list[str]] = {}
    for name in weight_map.names():
        file = weight_map.text(name)
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise weight_map.error(name, f"must name a .safetensors file beside it (got {file!r})")
        shards.setdefault(path / file, []).append(name)
    for file_path, names in shards.items():
        if not file_path.is_file():
            raise CheckpointError(
                f"{file_path.name}: not found in {path}, but {INDEX} says that it holds "
                f"{names[0]} and {len(names) - 1} more tensors"
            )
    return shards


def _no_weights(path: Path) -> CheckpointError:
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
    if pickled:
        return CheckpointError(
            f"{path}: holds only pickled weights ({pickled[0]}), which can execute code and are "
            f"never loaded; convert them to {SINGLE} (save_pretrained of transformers does)"
        )
    return CheckpointError(f"{path}: has neither {SINGLE} nor {INDEX}; safetensors is required")
