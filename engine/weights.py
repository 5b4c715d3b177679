"""Streaming loader of safetensors checkpoints, single or sharded.

Everything that can be wrong is found from the files' headers, before the first byte of a weight is
copied; then each tensor goes from the mapped file straight to its place in the model's parameters,
where q, k, v and gate, up lie stacked. Pickled files are never opened: they can execute code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.linear import Linear
from engine.models.causal_lm import CausalLM
from engine.models.fields import Fields, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# Buffers that old checkpoints carry although they follow from the configuration.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)

# Types in the header of a safetensors file, with their bytes; others need a quantised model.
_FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of the checkpoint, as the header of its file describes it."""

    file: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * _FLOATS[self.dtype]


def load_weights(
    model: CausalLM, path: Path, *, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill the parameters of `model` from the checkpoint folder `path`, cast to their dtype.

    `on_progress` is called with (bytes read so far, bytes in all), at last with both equal.

    Raises:
        CheckpointError: a file is missing or corrupt, or a tensor is missing, unknown or of a
            wrong shape; the model is then unchanged, unless a file breaks while it is read.
    """
    stored = _read_headers(path)
    places = _match(stored, _destinations(model), tied=model.lm_head is None)
    total = sum(stored[name].num_bytes for name in places)
    loaded = 0
    by_file: dict[Path, list[str]] = {}
    for name in places:
        by_file.setdefault(stored[name].file, []).append(name)
    for file, names in by_file.items():
        with _open(file) as reader:
            for name in names:
                places[name].copy_(_read(reader, file, name))
                loaded += stored[name].num_bytes
                if on_progress is not None:
                    on_progress(loaded, total)


def _destinations(model: nn.Module) -> dict[str, Tensor]:
    """Return where each tensor of the checkpoint goes, by its name there."""
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            # The parts of a stacked projection have their names in place of the module's own.
            parent = path.rpartition(".")[0]
            tensors = module.destinations()
        else:
            parent = path
            tensors = dict(module.named_parameters(recurse=False))
        for name, tensor in tensors.items():
            places[f"{parent}.{name}" if parent else name] = tensor
    return places


def _match(
    stored: dict[str, _Stored], places: dict[str, Tensor], *, tied: bool
) -> dict[str, Tensor]:
    """Return the place of every stored tensor that is to be loaded; raise unless they fit."""
    if tied and _HEAD in stored:
        if _EMBEDDING in stored:
            _require_tied(stored)
            stored = {name: tensor for name, tensor in stored.items() if name != _HEAD}
        else:
            places = {_HEAD if name == _EMBEDDING else name: to for name, to in places.items()}
    for name in places:
        if name not in stored:
            raise CheckpointError(f"{name}: missing from the checkpoint")
    for name, tensor in stored.items():
        if name.endswith(_HARMLESS_SUFFIXES):
            continue
        if name not in places:
            raise CheckpointError(
                f"{name}: tensor in {tensor.file.name} that this architecture does not have"
            )
        if tensor.dtype not in _FLOATS:
            raise CheckpointError(
                f"{name}: has dtype {tensor.dtype} in {tensor.file.name}; supported: "
                f"{', '.join(_FLOATS)}"
            )
        wanted = tuple(places[name].shape)
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{name}: has shape {list(tensor.shape)} in {tensor.file.name}, but config.json "
                f"asks for {list(wanted)}"
            )
    return places


def _require_tied(stored: dict[str, _Stored]) -> None:
    """Raise if a checkpoint with tied embeddings brings a head of its own that differs."""
    tensors = []
    for name in (_EMBEDDING, _HEAD):
        with _open(stored[name].file) as reader:
            tensors.append(_read(reader, stored[name].file, name))
    if not torch.equal(*tensors):
        raise CheckpointError(
            f"{_HEAD}: differs from {_EMBEDDING}, although config.json ties them; set "
            "tie_word_embeddings to false to use both"
        )


def _read_headers(path: Path) -> dict[str, _Stored]:
    """Return every tensor of the checkpoint folder, by name."""
    stored: dict[str, _Stored] = {}
    for file, promised in _shards(path).items():
        with _open(file) as reader:
            found = list(reader.keys())
            for name in promised:
                if name not in found:
                    raise CheckpointError(f"{name}: {INDEX} says {file.name}, which lacks it")
            for name in found:
                if name in stored:
                    raise CheckpointError(
                        f"{name}: found in both {stored[name].file.name} and {file.name}"
                    )
                header = reader.get_slice(name)
                stored[name] = _Stored(file, tuple(header.get_shape()), header.get_dtype())
    return stored


def _shards(path: Path) -> dict[Path, list[str]]:
    """Return the files of the checkpoint, each with the tensors that the index says it holds."""
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


def _open(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: corrupt or truncated safetensors file: {error}") from None


def _read(reader: safe_open, file: Path, name: str) -> Tensor:
    try:
        tensor: Tensor = reader.get_tensor(name)  # type: ignore[no-untyped-call]
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{name}: cannot be read from {file}: {error}") from None
    return tensor
