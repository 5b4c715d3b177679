"""Sharding: the smaller model that each rank computes (tensor parallelism).

A rank has whole KV heads with their queries, features of each MLP and rows of the vocabulary. What
its attention and its MLP return is a part of a sum over the ranks. Parts may differ in size by one
unit, and rank 0, which also draws, has the smallest. Importing this imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from engine.errors import UnsupportedError
from engine.models.spec import AttentionSpec, Gated, LayerSpec, ModelSpec, MoE, Plain, ShardRange

_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# Projections of which ranks have parts of the inputs, so that their results are summed.
SUMMED = (".o_proj", ".down_proj")

_FEATURES = 16  # in one unit, if there are so many: what a GEMM on a CPU packs together
_MUCH_MORE = 1.25
_TOKENS = 64  # likewise: rows of a head are padded to as many


def split(units: int, ranks: int, rank: int) -> range:
    """Return which of `units` in a row a rank has; sizes differ by one, rank 0 has the fewest."""
    return range(units * rank // ranks, units * (rank + 1) // ranks)


def shard(
    spec: ModelSpec,
    rank: int,
    num_ranks: int,
    *,
    feature_unit: int = 1,
    expert_parallel: bool = False,
) -> ModelSpec:
    """Return what `rank` of `num_ranks` computes of the whole model `spec`.

    Args:
        feature_unit: features of an MLP that are stored together, and not cut if that can be.
        expert_parallel: a rank has whole experts of a mixture, not a part of each.

    Raises:
        UnsupportedError: the model has too few heads, features or tokens; names the largest
            number of ranks.
    """
    if num_ranks == 1:
        return spec
    if spec.state_shapes:
        raise UnsupportedError(
            "must be 1 for this model, whose layers keep states", param="tensor_parallel_size"
        )
    if (most := max_ranks(spec, expert_parallel=expert_parallel)) < num_ranks:
        raise UnsupportedError(
            f"must be at most {most} for this model (got {num_ranks}), which is not cut within a "
            "head, a feature or an expert; set it to that, or lower",
            param="tensor_parallel_size",
        )
    cut = _Cut(rank, num_ranks, math.lcm(_FEATURES, feature_unit), expert_parallel)
    names = spec.tensor_names
    if names.qkv_heads:
        heads = len(split(names.qkv_heads, num_ranks, rank))
        names = replace(names, qkv_heads=heads)
    return replace(
        spec,
        layers=tuple(map(cut.layer, spec.layers)),
        tensor_names=names,
        rank=rank,
        num_ranks=num_ranks,
        vocabulary=cut.part(spec.vocab_size, _TOKENS),
    )


def parts_of(spec: ModelSpec, name: str) -> tuple[ShardRange, ...]:
    """Return which heads, features or tokens the rank `spec` has of a tensor; (): all.

    Several parts are one after the other in the tensor.

    Args:
        name: ours of the tensor, or of its projection.
    """
    if spec.num_ranks == 1:
        return ()
    if (layer := _LAYER.match(name)) is None:
        return () if spec.vocabulary is None else (spec.vocabulary,)
    path = name[layer.end() :].split(".")
    attention, mlp = spec.layers[int(layer[1])].attention, spec.layers[int(layer[1])].mlp
    queries, keys, features = attention.query_heads, attention.kv_heads, mlp.features
    if isinstance(mlp, MoE) and "shared_expert" in path:
        features = mlp.shared_features
    if "qkv_proj" in path:
        # Heads that are side by side are cut as one.
        found = [queries] if spec.tensor_names.qkv_heads else [queries, keys, keys]
    elif {"q_proj", "q_norm", "o_proj", "sinks"}.intersection(path):
        found = [queries]
    elif {"k_proj", "v_proj", "k_norm"}.intersection(path):
        found = [keys]
    else:
        # Gates and ups of experts alternate, those of others are one after the other.
        is_stacked = "gate_up_proj" in path and "experts" not in path
        found = [features, features] if is_stacked else [features]
    return tuple(part for part in found if part is not None)


def ranges_of(parts: Iterable[ShardRange], unit: int) -> tuple[range, ...]:
    """Return where `parts` are in a dimension in which one is after the other.

    Args:
        unit: elements of each head, feature or token.
    """
    found, before = [], 0
    for part in parts:
        start = unit * (before + part.start)
        found.append(range(start, start + unit * part.size))
        before += part.full
    return tuple(found)


def experts_of(spec: ModelSpec, name: str) -> ShardRange | None:
    """Return which experts the rank `spec` has, if our tensor `name` is of them; None: all."""
    if (layer := _LAYER.match(name)) is None or ".experts." not in name:
        return None
    mlp = spec.layers[int(layer[1])].mlp
    return mlp.experts if isinstance(mlp, MoE) else None


def max_ranks(spec: ModelSpec, *, expert_parallel: bool = False) -> int:
    """Return into how many ranks the whole model `spec` can be cut."""
    if spec.state_shapes:
        return 1
    return min(spec.vocab_size, *(_most_of(layer, expert_parallel) for layer in spec.layers))


def token_counts(vocab_size: int, num_ranks: int) -> list[int]:
    """Return how many tokens of the vocabulary each rank has."""
    return [
        _Cut(rank, num_ranks, _FEATURES).part(vocab_size, _TOKENS).size for rank in range(num_ranks)
    ]


def _most_of(layer: LayerSpec, expert_parallel: bool) -> int:
    mlp = layer.mlp
    sizes = [mlp.num_experts if isinstance(mlp, MoE) and expert_parallel else mlp.size]
    if isinstance(mlp, MoE) and mlp.shared_size:
        sizes.append(mlp.shared_size)
    return min(layer.attention.num_heads, *sizes)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cuts the parts of a model for one rank."""

    rank: int
    num_ranks: int
    features: int  # at most, in one unit
    expert_parallel: bool = False

    def layer(self, layer: LayerSpec) -> LayerSpec:
        return replace(layer, mixer=self._attention(layer.attention), mlp=self._mlp(layer.mlp))

    def part(self, size: int, largest_unit: int) -> ShardRange:
        """Return the rank's part of `size`, in the largest units that leave one for each rank.

        Smaller ones, if the largest rank would have much more than its share.
        """
        unit = largest_unit
        while unit > 1 and not self._is_fair(size, unit):
            unit //= 2
        found = split(-(-size // unit), self.num_ranks, self.rank)
        start = unit * found.start
        return ShardRange(start, min(unit * found.stop, size) - start, size)

    def _is_fair(self, size: int, unit: int) -> bool:
        """Return whether each rank has a unit, and none much more than its share of large ones."""
        num_units = -(-size // unit)
        most = unit * -(-num_units // self.num_ranks)
        is_much = unit > _FEATURES and most * self.num_ranks > _MUCH_MORE * size
        return num_units >= self.num_ranks and not is_much

    def _attention(self, spec: AttentionSpec) -> AttentionSpec:
        num_kv_heads, per_head = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
        heads = split(num_kv_heads, self.num_ranks, self.rank)
        queries = range(per_head * heads.start, per_head * heads.stop)
        shares_keys = False
        if num_kv_heads < self.num_ranks:
            # Several ranks have the same KV head; its queries are dealt out among them.
            head = num_kv_heads * self.rank // self.num_ranks
            first, after = (-(-each * self.num_ranks // num_kv_heads) for each in (head, head + 1))
            its = split(per_head, after - first, self.rank - first)
            heads = range(head, head + 1)
            queries = range(per_head * head + its.start, per_head * head + its.stop)
            shares_keys = self.rank > first
        return replace(
            spec,
            num_heads=len(queries),
            num_kv_heads=len(heads),
            query_heads=ShardRange(queries.start, len(queries), spec.num_heads),
            kv_heads=ShardRange(heads.start, len(heads), num_kv_heads),
            shares_keys=shares_keys,
        )

    def _mlp(self, spec: Gated | Plain | MoE) -> Gated | Plain | MoE:
        if isinstance(spec, MoE) and self.expert_parallel:
            own = split(spec.num_experts, self.num_ranks, self.rank)
            experts = ShardRange(own.start, len(own), spec.num_experts)
            spec = replace(spec, experts=experts)
        else:
            features = self.part(spec.size, self.features)
            spec = replace(spec, size=features.size, features=features)
        if isinstance(spec, MoE) and spec.shared_size:
            shared = self.part(spec.shared_size, self.features)
            spec = replace(spec, shared_size=shared.size, shared_features=shared)
        return spec
