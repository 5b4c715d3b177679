"""Mapping of checkpoint tensors to parameters of the model, or to parts of stacked ones."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.layers.linear import Linear
from engine.layers.vocabulary import Embedding
from engine.weights.headers import FLOATS, StoredTensor
from engine.weights.reading import hold_equal_values

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"

# Buffers found in old checkpoints, although they follow from the configuration.
_HARMLESS_SUFFIXES = (".rotary_emb.inv_freq",)


def destinations(model: nn.Module) -> dict[str, Tensor]:
    """Return the destination of each checkpoint tensor, by its name; all are contiguous."""
    places: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            # The parts of a stacked projection replace the module's own name.
            parent = path.rpartition(".")[0]
            tensors = module.destinations()
        else:
            parent = path
            tensors = dict(module.named_parameters(recurse=False))
            if isinstance(module, Embedding):
                tensors["weight"] = module.rows  # without the padding
        for name, tensor in tensors.items():
            places[f"{parent}.{name}" if parent else name] = tensor
    return places


def match_tensors(
    stored: Mapping[str, StoredTensor], places: Mapping[str, Tensor], *, tied: bool
) -> list[tuple[StoredTensor, Tensor]]:
    """Return every tensor to load with its destination, which has the same shape.

    Args:
        tied: whether the LM head shares the embedding's weight.

    Raises:
        CheckpointError: a tensor is missing, unknown, of a wrong shape or an unsupported dtype, or
            a tied checkpoint has a head that differs from its embedding.
    """
    if tied and _HEAD in stored:
        if _EMBEDDING in stored:
            _require_tied(stored[_EMBEDDING], stored[_HEAD])
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
        require_float(tensor)
        wanted = tuple(places[name].shape)
        if tensor.shape != wanted:
            raise CheckpointError(
                f"{name}: has shape {list(tensor.shape)} in {tensor.file.name}, but config.json "
                f"asks for {list(wanted)}"
            )
    return [(stored[name], place) for name, place in places.items()]


def require_float(tensor: StoredTensor) -> None:
    """Raise `CheckpointError` if the tensor's dtype is not supported."""
    if tensor.type_name not in FLOATS:
        raise CheckpointError(
            f"{tensor.name}: has dtype {tensor.type_name} in {tensor.file.name}; supported: "
            f"{', '.join(FLOATS)}"
        )


def _require_tied(embedding: StoredTensor, head: StoredTensor) -> None:
    """Raise if a checkpoint with tied embeddings has a separate head that differs."""
    for tensor in (embedding, head):
        require_float(tensor)
    if not hold_equal_values(embedding, head):
        raise CheckpointError(
            f"{_HEAD}: differs from {_EMBEDDING}, although config.json ties them; set "
            "tie_word_embeddings to false to use both"
        )
