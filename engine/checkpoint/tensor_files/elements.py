"""Reading of a tensor's elements from its file.

Files are read with pread rather than mapped: a file that is truncated meanwhile is then an error
and not a SIGBUS, offsets need no alignment, and file pages do not count as our memory.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.gguf.blocks import dequantize_blocks
from engine.checkpoint.tensor_files.stored import StoredTensor
from engine.errors import CheckpointError

_COMPARED_ELEMENTS = 2**22


def read_tensor(tensor: StoredTensor) -> Tensor:
    """Return a small stored tensor, of one of `DTYPES` or in blocks, on the host.

    Raises:
        CheckpointError: the file cannot be opened or read, or is too short.
    """
    with open_file(tensor.file) as file:
        return read_elements(file, tensor, 0, tensor.num_elements).view(tensor.shape)


def hold_equal_values(left: StoredTensor, right: StoredTensor) -> bool:
    """Return whether two stored tensors of any float dtypes have equal shapes and values.

    Raises:
        CheckpointError: a file cannot be opened or read, or is too short.
    """
    if left.shape != right.shape:
        return False
    with open_file(left.file) as left_file, open_file(right.file) as right_file:
        for start in range(0, left.num_elements, _COMPARED_ELEMENTS):
            count = min(_COMPARED_ELEMENTS, left.num_elements - start)
            ours = read_elements(left_file, left, start, count)
            theirs = read_elements(right_file, right, start, count)
            if not bool((ours == theirs).all()):
                return False
    return True


def read_elements(file: io.FileIO, tensor: StoredTensor, start: int, count: int) -> Tensor:
    """Return `count` elements from element `start` on, flat; of blocks the values, in float32.

    Raises:
        CheckpointError: the file cannot be read, or is too short.
    """
    if tensor.is_in_blocks:
        blocks = torch.empty(tensor.bytes_of(count), dtype=torch.uint8)
        read_into(blocks, file, tensor, start)
        return dequantize_blocks(blocks, tensor.type_name)
    elements = torch.empty(count, dtype=tensor.dtype)
    read_into(elements.view(torch.uint8), file, tensor, start)
    return elements


def read_into(memory: Tensor, file: io.FileIO, tensor: StoredTensor, start: int) -> None:
    """Fill `memory`, uint8 [n] on the host, starting at element `start` of `tensor`.

    Raises:
        CheckpointError: the file cannot be read, or is too short.
    """
    rest = memory.numpy().data
    offset = tensor.offset + tensor.bytes_of(start)
    try:
        while rest:
            count = os.preadv(file.fileno(), [rest], offset)
            if count == 0:
                raise OSError("the file is shorter now than its header says")
            rest = rest[count:]
            offset += count
    except OSError as error:
        raise CheckpointError(
            f"cannot be read from {tensor.file}: {error}", param=tensor.name
        ) from None


def open_file(file: Path) -> io.FileIO:
    """Return `file`, open for reading without a buffer.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"cannot be opened: {error.strerror}", param=str(file)) from None
