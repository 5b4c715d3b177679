"""Self-attention over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.execution.attention import LayerCache, StepAttention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.models.model_config import ModelConfig
from kernels.paged_cache import FP8
from kernels.rotary import rotary_and_cache


class Attention(nn.Module):
    """Grouped-query attention of one layer, with q, k and v in one product.

    Attributes:
        num_heads, num_kv_heads, head_dim, sliding_window: of the model's configuration.
        k_scale, v_scale: float32 [num_kv_heads], what the keys and values in a float8 cache are to
            be multiplied by; 1 unless the checkpoint brings others.

    Args:
        sliding_window: positions a token sees, None for all.
        qk_norm: normalise the queries and keys of each head before they are rotated.
    """

    k_scale: Tensor
    v_scale: Tensor

    def __init__(
        self,
        config: ModelConfig,
        *,
        sliding_window: int | None,
        qk_norm: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        dim = config.head_dim
        self.num_heads, self.num_kv_heads, self.head_dim = (
            config.num_heads,
            config.num_kv_heads,
            dim,
        )
        self._sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
        self._scale = dim**-0.5
        self.sliding_window = sliding_window
        self.qkv_proj: nn.Module = Linear(
            config.hidden_size,
            dict(zip(("q_proj", "k_proj", "v_proj"), self._sizes, strict=True)),
            bias=config.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj: nn.Module = Linear(
            self._sizes[0],
            {"o_proj": config.hidden_size},
            bias=config.output_bias,
            dtype=dtype,
            device=device,
        )
        self._norm_eps = eps = config.rms_norm_eps
        self.q_norm = RMSNorm(dim, eps, dtype=dtype, device=device) if qk_norm else None
        self.k_norm = RMSNorm(dim, eps, dtype=dtype, device=device) if qk_norm else None
        for name in ("k_scale", "v_scale"):
            ones = torch.ones(config.num_kv_heads, dtype=torch.float32, device=device)
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
