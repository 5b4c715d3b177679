"""The seam between models and attention kernels: a backend is chosen by name, plans once per step."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from engine.execution.batch import Batch


class LayerCache(NamedTuple):
    """Paged keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    key: Tensor
    value: Tensor


class StepAttention(Protocol):
    """Attention of one step; the same object serves every layer."""

    def attend(
        self, query: Tensor, cache: LayerCache, *, scale: float, sliding_window: int | None
    ) -> Tensor:
        """Causal attention of `query` [T, num_heads, head_dim] over the cached sequences.

        The step's own keys and values have been written to `cache` already. With a sliding window
        of w, position p sees positions p - w + 1 .. p. Returns [T, num_heads, head_dim].
        """


class AttentionBackend(Protocol):
    """Prepares what every layer of a step shares (lengths, block runs, split plans)."""

    def plan(self, batch: Batch) -> StepAttention:
        """Return the attention of the step that `batch` describes."""
