"""Self-attention over the paged KV cache."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from engine.layers.norm import RMSNorm
from engine.layers.scheme import Scheme
from kernels.paged_cache import FP8
from kernels.rotary import rotary_and_cache


class LayerCache(NamedTuple):
    """Paged keys and values of one layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    The dtype is the model's, or float8_e4m3fn.
    """

    key: Tensor
    value: Tensor


class StepAttention(Protocol):
    """Attention of one step; the same object serves every layer."""

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        *,
        scale: float,
        sliding_window: int | None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `query` [T, num_heads, head_dim] over the cached sequences.

        The step's own keys and values have been written to `cache` already. With a sliding window
        of w, position p sees positions p - w + 1 .. p. With a float8 cache, and only then,
        `key_scale` and `value_scale` are float32 [num_kv_heads], the scales that dequantise it.
        Returns [T, num_heads, head_dim].
        """


class Attention(nn.Module):
    """Grouped-query attention of one layer, with q, k and v in one product.

    Attributes:
        num_heads, num_kv_heads, head_dim, sliding_window: as given.
        k_scale, v_scale: float32 [num_kv_heads], scales of the keys and values in a float8 cache;
            1 unless the checkpoint has others.

    Args:
        scale: of the scores.
        qkv_bias: whether the projections of queries, keys and values have a bias.
        output_bias: whether the projection of the output has one.
        sliding_window: positions a token sees, its own included; None for all.
        qk_norm_eps: normalise the queries and keys of each head before they are rotated; None: do
            not.
        scheme: makes the projections.
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
        sliding_window: int | None,
        qk_norm_eps: float | None,
        scheme: Scheme,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        self._scale = scale
        self.sliding_window = sliding_window
        parts = dict(zip(("q_proj", "k_proj", "v_proj"), self._sizes, strict=True))
        self.qkv_proj = scheme.linear(hidden_size, parts, bias=qkv_bias)
        self.o_proj = scheme.linear(self._sizes[0], {"o_proj": hidden_size}, bias=output_bias)
        self._norm_eps = qk_norm_eps or 0.0
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm_eps is not None:
            dtype, device = scheme.dtype, scheme.device
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype=dtype, device=device)
        for name in ("k_scale", "v_scale"):
            ones = torch.ones(num_kv_heads, dtype=torch.float32, device=scheme.device)
            self.register_buffer(name, ones)

    def forward(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
        attention: StepAttention,
    ) -> Tensor:
        """Return the attention output of `x`, both [T, hidden_size]; writes T slots of `cache`.

        `rotary` holds cos and sin of the tokens' positions.
        """
        q, k, v = self.qkv_proj(x).split(self._sizes, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k = k.unflatten(-1, (self.num_kv_heads, self.head_dim))
        v = v.unflatten(-1, (self.num_kv_heads, self.head_dim))
        is_float8 = cache.key.dtype == FP8
        key_scale, value_scale = (self.k_scale, self.v_scale) if is_float8 else (None, None)
        q = rotary_and_cache(
            q,
            k,
            v,
            *rotary,
            cache.key,
            cache.value,
            slot_mapping,
            query_norm=None if self.q_norm is None else self.q_norm.weight,
            key_norm=None if self.k_norm is None else self.k_norm.weight,
            norm_eps=self._norm_eps,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        mixed = attention.attend(
            q,
            cache,
            scale=self._scale,
            sliding_window=self.sliding_window,
            key_scale=key_scale,
            value_scale=value_scale,
        )
        out: Tensor = self.o_proj(mixed.flatten(1))
        return out
