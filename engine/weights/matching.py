"""Mapping of checkpoint tensors to parameters of the model, or to parts of stacked ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.checkpoint.tensor_files.elements import read_tensor
from engine.checkpoint.tensor_files.headers import where_missing
from engine.checkpoint.tensor_files.stored import DTYPES, FLOATS, StoredTensor
from engine.errors import CheckpointError
from engine.layers.experts import Experts
from engine.layers.linear.linear import Linear
from engine.layers.vocabulary import Embedding, LMHead
from engine.models.tensor_names import EMBEDDING, HEAD, TensorNames
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from engine.quantization.stored import StoredProjection


class Place(NamedTuple):
    """Where a tensor of a checkpoint goes.

    Attributes:
        tensor: has the elements in the order of the checkpoint's tensor, and may be strided.
        shape: of the checkpoint's tensor, a dimension of which may be several of `tensor`.
        other: serves a tensor that the checkpoint has in another shape.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    other: Place | None = None

    def of_shape(self, shape: tuple[int, ...]) -> Place:
        """Return the place for the checkpoint's tensor, which has that shape."""
        return self.other if self.other is not None and self.other.shape == shape else self


def destinations(model: nn.Module, names: TensorNames) -> dict[str, Place]:
    """Return the destination of each tensor of a checkpoint, by our name of it."""
    places: dict[str, Place] = {}
    for path, module in model.named_modules():
        if isinstance(module, (StoredProjection, nn.ParameterList)):
            continue  # a part of a quantised module
        # The projections that a linear stacks are named beside it.
        parent, _, name = path.rpartition(".")
        tensors: dict[str, Tensor]
        if isinstance(module, Linear) and name in names.stacked:
            tensors = {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}
        elif isinstance(module, Experts) and names.experts == "gates and ups":
            for key, place in _stacked_experts(module, names).items():
                places[f"{parent}.{key}"] = place
            continue
        elif isinstance(module, (Linear, Embedding, Experts, QuantizedLinear, QuantizedExperts)):
            tensors = module.destinations()
        else:
            parent, tensors = path, dict(module.named_parameters(recurse=False))
        heads = names.qkv_heads if isinstance(module, Linear) and name == "qkv_proj" else 0
        is_transposed = names.transposed and isinstance(module, Linear)
        for name, tensor in tensors.items():
            if is_transposed and not isinstance(module, LMHead) and tensor.dim() == 2:
                tensor = tensor.t()
            shape = tuple(tensor.shape)
            if heads:
                tensor = _side_by_side(tensor, 0, (3, heads))
            places[f"{parent}.{name}" if parent else name] = Place(tensor, shape)
    return places


def _stacked_experts(experts: Experts, names: TensorNames) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for name, tensor in experts.stacked_destinations().items():
        splits = names.gates_first and name.startswith("experts.gate_up")
        place = _outputs_at(tensor.dim() - 1, tensor, gates_first=splits)
        if names.outputs_first is not False and tensor.dim() == 3:
            other = _outputs_at(1, tensor.transpose(1, 2), gates_first=splits)
            place = other if names.outputs_first else place._replace(other=other)
        places[name] = place
    return places


def _outputs_at(dim: int, tensor: Tensor, *, gates_first: bool) -> Place:
    """Return the place of experts, whose gates and ups alternate in `tensor`, at `dim`."""
    shape = tuple(tensor.shape)
    view = _side_by_side(tensor, dim, (shape[dim] // 2, 2)) if gates_first else tensor
    return Place(view, shape)


def _side_by_side(tensor: Tensor, dim: int, counts: tuple[int, int]) -> Tensor:
    """Return a view in whose order the parts of a dimension alternate.

    Args:
        counts: of the parts, and of what each part has one of.
    """
    return torch.unflatten(tensor, dim, (*counts, -1)).transpose(dim, dim + 1)


def match_tensors(
    stored: Mapping[str, StoredTensor],
    places: Mapping[str, Place],
    names: TensorNames,
    *,
    tied: bool,
) -> list[tuple[StoredTensor, Tensor]]:
    """Return every tensor to load with its destination.

    Args:
        stored: the checkpoint's tensors, by its names of them.
        places: what `destinations` returned.
        names: how the checkpoint names our tensors.
        tied: whether the LM head shares the embedding's weight; one that is stored is then left
            out (`with_stored_head` compares them).

    Raises:
        CheckpointError: a tensor is missing, unknown, or of a wrong shape or an unsupported dtype.
    """
    prefix = names.find_prefix(stored)
    places = {names.of(name, prefix): place for name, place in places.items()}
    embedding, head = names.of(EMBEDDING, prefix), names.of(HEAD, prefix)
    if tied and head in stored:
        if embedding in stored:
            stored = {name: tensor for name, tensor in stored.items() if name != head}
        else:
            places = {head if name == embedding else name: to for name, to in places.items()}
    for name in places:
        if name not in stored:
            raise CheckpointError(f"missing from {where_missing(stored)}", param=name)
    found: list[tuple[StoredTensor, Tensor]] = []
    for name, tensor in stored.items():
        if name not in places:
            if names.is_ignored(name) or _is_empty_bias(tensor, places):
                continue
            raise CheckpointError(
                f"is not a tensor of this architecture (in {tensor.file.name})", param=name
            )
        place, wanted, _ = places[name].of_shape(tensor.shape)
        tensor = tensor.as_stored(place.dtype)
        _require_type(tensor, place.dtype)
        # A single number may be stored as a scalar or as a list of one, a vector as a row.
        if _without_ones(tensor.shape) != _without_ones(wanted):
            raise CheckpointError(
                f"has shape {list(tensor.shape)} in {tensor.file.name}, but "
                f"{tensor.described_by} asks for {list(wanted)}",
                param=name,
            )
        found.append((tensor, place))
    return found


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_empty_bias(tensor: StoredTensor, places: Mapping[str, Place]) -> bool:
    """Return whether it is zeros beside a projection of GPTQ: AutoGPTQ gives each a bias."""
    module = tensor.name.removesuffix(".bias")
    if module == tensor.name or f"{module}.qweight" not in places:
        return False
    require_float(tensor)
    return not bool(read_tensor(tensor).any())


def _require_type(tensor: StoredTensor, dtype: torch.dtype) -> None:
    """Raise `CheckpointError` if a tensor cannot be read as `dtype`."""
    if dtype in FLOATS.values():
        require_float(tensor)
    elif DTYPES.get(tensor.type_name) != dtype:
        raise CheckpointError(
            f"has dtype {tensor.type_name} in {tensor.file.name}, but "
            f"{tensor.described_by} asks for {str(dtype).removeprefix('torch.')}",
            param=tensor.name,
        )


def require_float(tensor: StoredTensor) -> None:
    """Raise `CheckpointError` if the tensor's dtype is not supported."""
    if not tensor.is_float:
        raise CheckpointError(
            f"has dtype {tensor.type_name} in {tensor.file.name}; supported: {', '.join(FLOATS)}",
            param=tensor.name,
        )
