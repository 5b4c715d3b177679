"""Self-attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.layers.linear.linear import parameter
from engine.layers.norm import RMSNorm
from engine.layers.rank_group import RankGroup
from engine.layers.rotary import Rotation
from engine.layers.scheme import Scheme
from kernels.attention.paged_cache import FP8
from kernels.gated_activation import sigmoid_gate
from kernels.rotary import rotary_and_cache


class LayerCache(NamedTuple):
    """Paged keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    The dtype is the model's, or float8_e4m3fn. Layers of different groups may share them, in
    different blocks.

    Attributes:
        group: of the layer, whose block tables list the blocks of each sequence.
    """

    key: Tensor
    value: Tensor
    group: int = 0


class AttentionInputs(NamedTuple):
    """What one layer attends with in one step.

    Attributes:
        query: [T, num_heads, head_dim].
        cache: to which the step's own keys and values have been written already.
        scale: of the scores.
        sliding_window: w: position p sees positions p - w + 1 .. p; None: all before it.
        soft_cap: c: scaled scores s become c tanh(s / c); None: they stay.
        sinks: float32 [num_heads], scores that take part in the softmax and have no value.
        key_scale, value_scale: float32 [num_kv_heads], dequantise a float8 cache; None for others.
    """

    query: Tensor
    cache: LayerCache
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None


class StepAttention(Protocol):
    """Attention of one step; the same object serves every layer."""

    def attend(self, inputs: AttentionInputs) -> Tensor:
        """Return causal attention over the cached sequences, [T, num_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys, before they are rotated.

    Attributes:
        unit_offset: as in `RMSNorm`.
        is_wide: over all heads together, not over each.
    """

    eps: float
    unit_offset: bool = False
    is_wide: bool = False

    def build(self, num_heads: int, head_dim: int, scheme: Scheme) -> RMSNorm:
        """Return the norm of `num_heads` heads, those of this rank."""
        return RMSNorm(
            num_heads * head_dim if self.is_wide else head_dim,
            self.eps,
            unit_offset=self.unit_offset,
            dtype=scheme.dtype,
            device=scheme.device,
        )


class Attention(nn.Module):
    """Grouped-query attention of one layer, with q, k and v in one product.

    Attributes:
        num_heads, num_kv_heads, head_dim, sliding_window, first_kv_head: as given.
        all_heads: query heads and KV heads of all ranks.
        k_scale, v_scale: float32 [num_kv_heads], scales of the keys and values in a float8 cache;
            1 unless the checkpoint has others.

    Args:
        scale: of the scores.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        output_bias: whether the projection of the output has one.
        rotary_interleaved: as in `kernels.rotary`.
        sliding_window: positions a token sees, its own included; None for all.
        soft_cap: of the scores; None: there is none.
        has_sinks: each head has a learned score without a value in the softmax.
        qk_norm: normalises queries and keys before they are rotated; None: they are not.
        has_gate: the output of each head is multiplied by the sigmoid of a gate, which its query
            projection gives behind its query.
        scheme: makes the projections.
        group: other ranks, which have the other heads; None: there are none.
        all_heads: query heads and KV heads of all ranks; None: these are all.
        first_kv_head: which of all KV heads is the first of these.
        shares_keys: an earlier rank has the same keys.
    """

    k_scale: Tensor
    v_scale: Tensor

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        qkv_bias: bool,
        output_bias: bool,
        rotary_interleaved: bool,
        sliding_window: int | None,
        soft_cap: float | None,
        has_sinks: bool,
        qk_norm: QKNorm | None,
        scheme: Scheme,
        has_gate: bool = False,
        group: RankGroup | None = None,
        all_heads: tuple[int, int] | None = None,
        first_kv_head: int = 0,
        shares_keys: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._group = group
        self.all_heads = all_heads or (num_heads, num_kv_heads)
        self.first_kv_head = first_kv_head
        self._shares_keys = shares_keys
        self._has_gate = has_gate
        query_dim = head_dim * (1 + has_gate)
        self._sizes = [num_heads * query_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self._scale = scale
        self._soft_cap = soft_cap
        self._interleaved = rotary_interleaved
        self.sinks: nn.Parameter | None = None
        if has_sinks:
            self.sinks = parameter(num_heads, dtype=torch.float32, device=scheme.device)
        self.sliding_window = sliding_window
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self._sizes, strict=True))
        self.qkv_proj = scheme.at("qkv_proj").linear(hidden_size, parts, bias=qkv_bias)
        self.o_proj = scheme.at("o_proj").linear(
            num_heads * head_dim, {"o_proj": hidden_size}, bias=output_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm is not None:
            self._norm_is_wide = qk_norm.is_wide
            self._fuses_norms = not qk_norm.is_wide and not qk_norm.unit_offset
            self.q_norm = qk_norm.build(num_heads, head_dim, scheme)
            self.k_norm = qk_norm.build(num_kv_heads, head_dim, scheme)
        for name in ("k_scale", "v_scale"):
            ones = torch.ones(num_kv_heads, dtype=torch.float32, device=scheme.device)
            self.register_buffer(name, ones)

    def forward(
        self,
        x: Tensor,
        rotary: Rotation,
        slot_mapping: Tensor,
        cache: LayerCache,
        attention: StepAttention,
    ) -> Tensor:
        """Return the attention output of `x`, both [T, hidden_size]; writes T slots of `cache`."""
        q, k, v = self.qkv_proj(x).split(self._sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, -1))
        gate: Tensor | None = None
        if self._has_gate:
            q, gate = q.chunk(2, dim=-1)
            q = q.contiguous()
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        query_norm, key_norm = self.q_norm, self.k_norm
        if query_norm is not None and key_norm is not None and not self._fuses_norms:
            if self._norm_is_wide and self._group is not None:
                q, k = self._normed_over_ranks(q, k, query_norm, key_norm, self._group)
            else:
                q = query_norm(q.flatten(1) if self._norm_is_wide else q).view(q.shape)
                k = key_norm(k.flatten(1) if self._norm_is_wide else k).view(k.shape)
            query_norm = key_norm = None
        is_float8 = cache.key.dtype == FP8
        key_scale, value_scale = (self.k_scale, self.v_scale) if is_float8 else (None, None)
        q = rotary_and_cache(
            q,
            k,
            v,
            rotary.cos,
            rotary.sin,
            cache.key,
            cache.value,
            slot_mapping,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            norm_eps=0.0 if query_norm is None else query_norm.eps,
            interleaved=self._interleaved,
            query_scale=rotary.query_scale,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        mixed = attention.attend(
            AttentionInputs(
                q,
                cache,
                self._scale,
                self.sliding_window,
                self._soft_cap,
                self.sinks,
                key_scale,
                value_scale,
            )
        )
        if gate is not None:
            mixed = sigmoid_gate(mixed, gate)
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out

    def _normed_over_ranks(
        self, q: Tensor, k: Tensor, query_norm: RMSNorm, key_norm: RMSNorm, group: RankGroup
    ) -> tuple[Tensor, Tensor]:
        """Return queries and keys, normalised over the heads of all ranks."""
        squares = torch.stack([each.float().square().sum((1, 2)) for each in (q, k)], 1)
        if self._shares_keys:
            squares[:, 1] = 0.0
        squares = group.sum(squares)
        normed = []
        for i, (x, norm) in enumerate(((q, query_norm), (k, key_norm))):
            mean = squares[:, i, None, None] / (self.all_heads[i] * self.head_dim)
            weight = norm.weight.float().view(x.shape[1:]) + norm.unit_offset
            normed.append((x.float() * torch.rsqrt(mean + norm.eps) * weight).to(x.dtype))
        return normed[0], normed[1]
