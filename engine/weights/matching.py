"""Mapping of checkpoint tensors to parameters of the model, or to parts of stacked ones."""

from __future__ import annotations

import re
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
from engine.models.causal_lm import CausalLM
from engine.models.sharding import SUMMED, experts_of, parts_of, ranges_of
from engine.models.spec import ModelSpec, ShardRange
from engine.models.tensor_names import EMBEDDING, HEAD, TensorNames
from engine.quantization.experts import QuantizedExperts
from engine.quantization.linear import QuantizedLinear
from engine.quantization.stored import Cut, StoredProjection

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_SUMMED_BIASES = tuple(f"{name}{end}" for name in SUMMED for end in (".bias", "_bias"))


class Piece(NamedTuple):
    """A part of a stored tensor, mostly all of it, and where it goes.

    Attributes:
        tensor: has the elements in the order of the checkpoint's tensor, and may be strided.
        shape: of the whole stored tensor, in the dimensions of `tensor`.
        start: index of the part's first element in each of them.
    """

    stored: StoredTensor
    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]

    @classmethod
    def whole(cls, stored: StoredTensor, tensor: Tensor) -> Piece:
        """Return all of `stored`."""
        return cls(stored, tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @property
    def window(self) -> tuple[slice, ...]:
        """Its elements in each dimension of the stored tensor."""
        sizes = zip(self.start, self.tensor.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)


class Destination(NamedTuple):
    """Where a tensor of a checkpoint goes.

    Attributes:
        tensor: has the elements in the order of the checkpoint's tensor, and may be strided.
        shape: of the checkpoint's tensor, a dimension of which may be several of `tensor`.
        other: serves a tensor that the checkpoint has in another shape.
        whole: shape that `tensor` has in a model that is not cut; None: this one.
        cut: of a rank, what it has of that; None: all.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    other: Destination | None = None
    whole: tuple[int, ...] | None = None
    cut: Cut | None = None

    def of_a_rank(
        self, whole: Destination, parts: tuple[ShardRange, ...], cut: Cut | None
    ) -> Destination:
        """Return it for a tensor that goes to `whole` in a model that is not cut.

        Args:
            parts: what the rank has of one dimension, one after the other.
            cut: the same, where it is known in elements.
        """
        other = self.other
        if other is not None and whole.other is not None:
            other = other.of_a_rank(whole.other, parts, cut)
        shape = tuple(whole.tensor.shape)
        cut = cut or _cut(tuple(self.tensor.shape), shape, parts)
        return Destination(self.tensor, whole.shape, other, shape, cut)

    def pieces(self, stored: StoredTensor) -> list[Piece]:
        """Return the pieces of its tensor, `stored`, that this rank has."""
        if self.whole is None or self.cut is None:
            return [Piece.whole(stored, self.tensor)]
        found, at = [], 0
        for each in self.cut.ranges:
            start = [0] * len(self.whole)
            start[self.cut.dim] = each.start
            mine = self.tensor.narrow(self.cut.dim, at, len(each))
            found.append(Piece(stored, mine, self.whole, tuple(start)))
            at += len(each)
        assert at == self.tensor.shape[self.cut.dim], f"{stored.name}: parts of another size"
        return found

    def of_shape(self, shape: tuple[int, ...]) -> Destination:
        """Return the destination of the checkpoint's tensor, which has that shape."""
        return self.other if self.other is not None and self.other.shape == shape else self


def destinations(model: nn.Module, names: TensorNames) -> dict[str, Destination]:
    """Return the destination of each tensor of a checkpoint, by our name of it."""
    targets: dict[str, Destination] = {}
    for path, module in model.named_modules():
        if isinstance(module, (StoredProjection, nn.ParameterList)):
            continue  # a part of a quantised module
        # The projections that a linear stacks are named beside it.
        parent, _, name = path.rpartition(".")
        tensors: dict[str, Tensor]
        if isinstance(module, Linear) and name in names.stacked:
            tensors = {f"{name}.{key}": tensor for key, tensor in module.named_parameters()}
        elif isinstance(module, Experts) and names.experts == "gates and ups":
            for key, target in _stacked_experts(module, names).items():
                targets[f"{parent}.{key}"] = target
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
            targets[f"{parent}.{name}" if parent else name] = Destination(tensor, shape)
    return targets


def rank_destinations(model: CausalLM, whole: CausalLM) -> dict[str, Destination | None]:
    """Return the same for one rank of the model `whole`, which may have shapes alone.

    None: another rank has it; or it is a bias that rank 0 adds to the sum over the ranks, and 0
    here.
    """
    spec = model.spec
    mine = destinations(model, spec.tensor_names)
    cuts = {
        f"{path.rpartition('.')[0]}.{name}": cut
        for path, module in model.named_modules()
        if isinstance(module, (QuantizedLinear, QuantizedExperts))
        for name, cut in module.cuts().items()
    }
    found: dict[str, Destination | None] = {}
    for name, target in destinations(whole, whole.spec.tensor_names).items():
        own = _own_name(spec, name)
        if own is None or (spec.rank and adds_to_sum(spec, name)):
            found[name] = None
            continue
        experts = experts_of(spec, name)
        parts = parts_of(spec, name) if experts is None else (experts,)
        found[name] = mine[own].of_a_rank(target, parts, cuts.get(own))
    return found


def _cut(
    mine: tuple[int, ...], whole: tuple[int, ...], parts: tuple[ShardRange, ...]
) -> Cut | None:
    """Return what a rank has of a tensor in which each head, feature or token is as large."""
    dim = next((dim for dim, size in enumerate(whole) if mine[dim] != size), None)
    if dim is None:
        return None
    return Cut(dim, ranges_of(parts, whole[dim] // sum(part.full for part in parts)))


def _own_name(spec: ModelSpec, name: str) -> str | None:
    """Return the rank's name of our tensor `name`, which counts its own experts; None: of others'.

    The name is the same, unless each expert has tensors of its own.
    """
    experts, number = experts_of(spec, name), _EXPERT.search(name)
    if experts is None or number is None:
        return name
    if int(number[1]) not in experts.indices:
        return None
    return f"{name[: number.start(1)]}{int(number[1]) - experts.start}{name[number.end(1) :]}"


def adds_to_sum(spec: ModelSpec, name: str) -> bool:
    """Return whether our tensor `name` is a bias of what is summed over the ranks."""
    return experts_of(spec, name) is None and name.endswith(_SUMMED_BIASES)


def _stacked_experts(experts: Experts, names: TensorNames) -> dict[str, Destination]:
    targets: dict[str, Destination] = {}
    for name, tensor in experts.stacked_destinations().items():
        splits = names.gates_first and name.startswith("experts.gate_up")
        target = _outputs_at(tensor.dim() - 1, tensor, gates_first=splits)
        if names.outputs_first is not False and tensor.dim() == 3:
            other = _outputs_at(1, tensor.transpose(1, 2), gates_first=splits)
            target = other if names.outputs_first else target._replace(other=other)
        targets[name] = target
    return targets


def _outputs_at(dim: int, tensor: Tensor, *, gates_first: bool) -> Destination:
    """Return the destination of experts, whose gates and ups alternate in `tensor`, at `dim`."""
    shape = tuple(tensor.shape)
    view = _side_by_side(tensor, dim, (shape[dim] // 2, 2)) if gates_first else tensor
    return Destination(view, shape)


def _side_by_side(tensor: Tensor, dim: int, counts: tuple[int, int]) -> Tensor:
    """Return a view in whose order the parts of a dimension alternate.

    Args:
        counts: of the parts, and of what each part has one of.
    """
    return torch.unflatten(tensor, dim, (*counts, -1)).transpose(dim, dim + 1)


def match_tensors(
    stored: Mapping[str, StoredTensor],
    targets: Mapping[str, Destination | None],
    names: TensorNames,
    *,
    tied: bool,
) -> list[Piece]:
    """Return every tensor to load with its destination.

    Args:
        stored: the checkpoint's tensors, by its names of them.
        targets: what `destinations` or `rank_destinations` returned.
        names: how the checkpoint names our tensors.
        tied: whether the LM head shares the embedding's weight; one that is stored is then left
            out (`as_stored` compares them).

    Raises:
        CheckpointError: a tensor is missing, unknown, or of a wrong shape or an unsupported dtype.
    """
    prefix = names.find_prefix(stored)
    targets = {names.of(name, prefix): target for name, target in targets.items()}
    embedding, head = names.of(EMBEDDING, prefix), names.of(HEAD, prefix)
    if tied and head in stored:
        if embedding in stored:
            stored = {name: tensor for name, tensor in stored.items() if name != head}
        else:
            targets = {head if name == embedding else name: to for name, to in targets.items()}
    for name in targets:
        if name not in stored:
            raise CheckpointError(f"missing from {where_missing(stored)}", param=name)
    found: list[Piece] = []
    for name, tensor in stored.items():
        if name not in targets:
            if names.is_ignored(name) or _is_empty_bias(tensor, targets):
                continue
            raise CheckpointError(
                f"is not a tensor of this architecture (in {tensor.file.name})", param=name
            )
        if (target := targets[name]) is None:
            continue
        target = target.of_shape(tensor.shape)
        wanted = target.shape
        tensor = tensor.as_stored(target.tensor.dtype)
        _require_type(tensor, target.tensor.dtype)
        # A single number may be stored as a scalar or as a list of one, a vector as a row.
        if _without_ones(tensor.shape) != _without_ones(wanted):
            raise CheckpointError(
                f"has shape {list(tensor.shape)} in {tensor.file.name}, but "
                f"{tensor.described_by} asks for {list(wanted)}",
                param=name,
            )
        found += target.pieces(tensor)
    return found


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _is_empty_bias(tensor: StoredTensor, targets: Mapping[str, Destination | None]) -> bool:
    """Return whether it is zeros beside a projection of GPTQ: AutoGPTQ gives each a bias."""
    module = tensor.name.removesuffix(".bias")
    if module == tensor.name or f"{module}.qweight" not in targets:
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
