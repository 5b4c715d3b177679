"""KVGroups: which layers of a model share a block table. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroups:
    """The layers of a model in groups, whose KV takes blocks of one size from one pool.

    All layers of a group see the same positions, so that one block table serves them. A block holds
    the KV of some tokens for one group: of as many layers as there are caches.

    Attributes:
        windows: of each group, positions that a token sees, its own included; None: all.
        layer_caches: of each layer, its group, and its cache in the blocks of that.
        num_caches: layers whose KV a block holds.
    """

    windows: tuple[int | None, ...]
    layer_caches: tuple[tuple[int, int], ...]
    num_caches: int

    @classmethod
    def single(cls, num_layers: int) -> KVGroups:
        """Return one group of all layers, without a window."""
        return cls((None,), tuple((0, layer) for layer in range(num_layers)), num_layers)


def group_layers(windows: Sequence[int | None], max_model_len: int) -> KVGroups:
    """Group the layers of a model with these windows, for sequences of up to `max_model_len`.

    A group has as many layers as there are without a window, so that none of their memory is left
    unused; the last group of each window may have fewer, and leaves the rest of its blocks unused.
    Where most layers have no window all are one group: too little would be saved.
    """
    limits = [None if w is None or w >= max_model_len else w for w in windows]
    kinds: dict[int | None, list[int]] = {kind: [] for kind in (None, *limits)}
    for layer, kind in enumerate(limits):
        kinds[kind].append(layer)
    without = len(kinds[None])
    if 2 * without > len(limits):
        kinds = {None: list(range(len(limits)))}
        without = len(limits)
    size = without or min(len(layers) for kind, layers in kinds.items() if kind is not None)
    groups: list[int | None] = []
    layer_caches = [(0, 0)] * len(limits)
    for kind, layers in kinds.items():
        for first in range(0, len(layers), size):
            for cache, layer in enumerate(layers[first : first + size]):
                layer_caches[layer] = (len(groups), cache)
            groups.append(kind)
    return KVGroups(tuple(groups), tuple(layer_caches), size)
