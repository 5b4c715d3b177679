"""Headers of a checkpoint's files, safetensors or GGUF: the location of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import read_gguf
from engine.checkpoint.lora.tensors import read_adapter
from engine.checkpoint.tensor_files.stored import StoredTensor, read_file
from engine.errors import CheckpointError
from engine.fields import Fields, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the checkpoint folder, by name; those that an adapter has are its.

    Raises:
        UnsupportedError: as `read_adapter`.
        CheckpointError: a file is missing, corrupt or shorter than in its header, or the files
            contradict the index.
    """
    if (path / GGUF).exists():
        return _gguf_tensors((path / GGUF).readlink())  # errors name the file that is linked to
    stored: dict[str, StoredTensor] = {}
    for file, promised in _shards(path).items():
        found = {tensor.name: tensor for tensor in read_file(file)}
        for name in promised:
            if name not in found:
                raise CheckpointError(
                    f"not found in {file.name}, although {INDEX} names that file", param=name
                )
        for name, tensor in found.items():
            if name in stored:
                raise CheckpointError(
                    f"found in both {stored[name].file.name} and {file.name}", param=name
                )
            stored[name] = tensor
    adapter = read_adapter(path)
    return stored if adapter is None else stored | adapter.whole


def where_missing(stored: Mapping[str, StoredTensor]) -> str:
    """Return the file that would hold, or name, a tensor that is not among `stored`, all there are.

    Of several files that is their index, or the parts of a GGUF.
    """
    first, *others = sorted({tensor.file.name for tensor in stored.values()})
    if any(tensor.is_gguf for tensor in stored.values()):
        return f"{first} and the other parts" if others else first
    return INDEX if others else first


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
            raise weight_map.error(
                name, f"must name a .safetensors file in the same folder (got {file!r})"
            )
        shards.setdefault(path / file, []).append(name)
    for file_path, names in shards.items():
        if not file_path.is_file():
            raise CheckpointError(
                f"not found in {path}; {INDEX} says that it holds {names[0]} and {len(names) - 1} "
                "more tensors",
                param=file_path.name,
            )
    return shards


def _no_weights(path: Path) -> CheckpointError:
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
    if pickled:
        return CheckpointError(
            f"holds only pickled weights ({pickled[0]}), which can execute code and are "
            f"never loaded; convert them to {SINGLE} (save_pretrained of transformers does)",
            param=str(path),
        )
    return CheckpointError(
        f"has neither {SINGLE} nor {INDEX}; safetensors is required", param=str(path)
    )
