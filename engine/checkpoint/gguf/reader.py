"""The header of a GGUF file: its metadata, and where its tensors lie. Imports no torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` has a
reader too; it takes 10 s for the tokens of a Qwen.
"""

from __future__ import annotations

import io
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.checkpoint.lfs import unreadable
from engine.errors import CheckpointError, UnsupportedError
from engine.fields import Fields

# Number of a type -> its name, and the elements and bytes of its blocks.
TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
_BLOCKS = {name: (num_elements, num_bytes) for name, num_elements, num_bytes in TYPES.values()}

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_STRING, _ARRAY = 8, 9
# Type of a value -> how `struct` spells it.
_NUMBERS = dict(enumerate("BbHhIif?", start=0)) | {10: "Q", 11: "q", 12: "d"}
_MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file; `shape` has the fastest dimension last."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    file: Path
    offset: int  # of its first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF file; of a file in parts that of the first, with the tensors of all."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, or of all parts of which `path` is the first.

    Raises:
        UnsupportedError: a tensor is of a type that is not read.
        CheckpointError: it is not of this format, broken, or too short for its tensors, or a part
            is missing, or not the first.
    """
    first = _read_part(path)
    tensors = dict(first.tensors)
    for part in _other_parts(first):
        for name, tensor in _read_part(part).tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"has tensor {name}, which {tensors[name].file.name} has too", param=str(part)
                )
            tensors[name] = tensor
    return replace(first, tensors=tensors)


def _other_parts(first: GgufFile) -> list[Path]:
    """Return the files beside the first, by the names that llama.cpp gives them."""
    fields = Fields(first.metadata, name=str(first.path))
    count = fields.integer("split.count", default=1, minimum=0)
    if count < 2:
        return []
    if fields.integer("split.no", minimum=0):
        raise fields.error("split.no", f"the file is a shard of {count}; pass the first shard")
    name, own = first.path.name, f"-00001-of-{count:05d}.gguf"
    if not name.endswith(own):
        raise fields.error(
            "split.count", f"the file name of the first of {count} shards must end with {own}"
        )
    stem = name.removesuffix(own)
    parts: list[Path] = []
    for i in range(2, count + 1):
        part = first.path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf")
        if not part.is_file():
            raise CheckpointError(
                f"not found; {name} is the first of {count} shards, which must be in one folder",
                param=str(part),
            )
        parts.append(part)
    return parts


def _read_part(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            return _Reader(path, file).read()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", param=str(path)) from None
    except UnicodeDecodeError:
        raise CheckpointError(
            "broken header: a string in it is not valid UTF-8", param=str(path)
        ) from None


class _Reader:
    def __init__(self, path: Path, file: io.BufferedReader) -> None:
        self._path, self._file = path, file
        self._size = path.stat().st_size
        self._section = "its header"  # what is being read, for errors

    def read(self) -> GgufFile:
        if self._file.read(len(_MAGIC)) != _MAGIC:
            problem = f"is not a GGUF file: it does not begin with {_MAGIC.decode()}"
            raise unreadable(self._path, problem)
        version = self._number("I")
        if version not in _VERSIONS:
            raise self._error(f"GGUF version {version} is not supported; supported: 2, 3")
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for i in range(num_fields):
            self._section = f"metadata field {i} of {num_fields}"
            key = self._string()
            self._section = f"metadata field {key}"
            metadata[key] = self._value(self._number("I"))
        tensors = []
        for i in range(num_tensors):
            self._section = f"the description of tensor {i} of {num_tensors}"
            tensors.append(self._tensor())
        alignment = metadata.get(_ALIGNMENT, 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._error(f"{_ALIGNMENT}: must be a positive integer (got {alignment!r})")
        start = -(-self._file.tell() // alignment) * alignment
        placed: dict[str, GgufTensor] = {}
        for name, shape, type_name, offset in tensors:
            num_bytes = self._num_bytes(name, shape, type_name)
            if offset % alignment:
                raise self._error(
                    f"tensor {name}: offset {offset} is not a multiple of {_ALIGNMENT} "
                    f"({alignment})"
                )
            if start + offset + num_bytes > self._size:
                raise self._error(f"is truncated: it ends before the end of tensor {name}")
            if name in placed:
                raise self._error(f"has tensor {name} twice")
            placed[name] = GgufTensor(name, shape, type_name, self._path, start + offset, num_bytes)
        return GgufFile(self._path, metadata, placed)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name, num_dims = self._string(), self._number("I")
        if not 0 < num_dims <= _MAX_DIMS:
            raise self._error(
                f"tensor {name}: must have 1 to {_MAX_DIMS} dimensions (got {num_dims})"
            )
        dims = [self._number("Q") for _ in range(num_dims)]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise UnsupportedError(
                f"type {kind} is not supported; supported: {', '.join(_BLOCKS)}",
                param=f"{self._path}: tensor {name}",
            )
        return name, tuple(reversed(dims)), TYPES[kind][0], offset

    def _num_bytes(self, name: str, shape: tuple[int, ...], type_name: str) -> int:
        num_elements, num_bytes = block_size(type_name)
        if shape[-1] % num_elements:
            raise self._error(
                f"tensor {name}: row length {shape[-1]} is not a multiple of the "
                f"block size {num_elements} of {type_name}"
            )
        return math.prod(shape) // num_elements * num_bytes

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._error(f"{self._section}: value type {kind} is unknown")
        kind, count = self._number("I"), self._number("Q")
        if kind in _NUMBERS:
            letter = _NUMBERS[kind]
            values = self._bytes(count * struct.calcsize(f"<{letter}"))
            return list(struct.unpack(f"<{count}{letter}", values))
        if kind != _STRING:
            raise self._error(f"{self._section}: array type {kind} is unknown")
        if count > self._size:  # before memory is taken for it
            raise self._truncated()
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        return self._bytes(self._number("Q")).decode()

    def _number(self, letter: str) -> Any:
        form = f"<{letter}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._size or len(content := self._file.read(count)) < count:
            raise self._truncated()
        return content

    def _truncated(self) -> CheckpointError:
        return self._error(f"is truncated: it ends before the end of {self._section}")

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(problem, param=str(self._path))


def block_size(type_name: str) -> tuple[int, int]:
    """Return the elements and bytes of a block of a type; of one element, if it has no blocks."""
    return _BLOCKS[type_name]
