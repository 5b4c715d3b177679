"""Decoder: the layers of a model, as its spec says."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from engine.layers.attention import Attention, LayerCache, StepAttention
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.scheme import Scheme
from engine.layers.vocabulary import Embedding
from engine.models.batch import Batch
from engine.models.spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec


def _norm(spec: NormSpec, size: int, scheme: Scheme) -> RMSNorm:
    return RMSNorm(size, spec.eps, dtype=scheme.dtype, device=scheme.device)


def _attention(spec: AttentionSpec, hidden_size: int, scheme: Scheme) -> Attention:
    return Attention(
        hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        qkv_bias=spec.qkv_bias,
        output_bias=spec.output_bias,
        sliding_window=spec.window,
        qk_norm_eps=None if spec.qk_norm is None else spec.qk_norm.eps,
        scheme=scheme,
    )


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, spec: LayerSpec, hidden_size: int, scheme: Scheme) -> None:
        super().__init__()
        self.spec = spec
        self.attention_norm = _norm(spec.norm, hidden_size, scheme)
        self.self_attn = _attention(spec.attention, hidden_size, scheme)
        self.mlp_norm = _norm(spec.norm, hidden_size, scheme)
        mlp = spec.mlp
        self.mlp = GatedMLP(
            hidden_size, mlp.size, activation=mlp.activation, bias=mlp.bias, scheme=scheme
        )

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotary: tuple[Tensor, Tensor],
        slot_mapping: Tensor,
        cache: LayerCache,
        attention: StepAttention,
    ) -> tuple[Tensor, Tensor]:
        """Return this layer's output, not yet added, and the residual stream to add it to."""
        if residual is None:
            x, residual = self.attention_norm(x), x
        else:
            x, residual = self.attention_norm.add(x, residual)
        x = self.self_attn(x, rotary, slot_mapping, cache, attention)
        x, residual = self.mlp_norm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Attributes:
        fused: runs all layers in one operation, from their tensors and the batch alone; None: the
            layers run one by one.
    """

    def __init__(self, spec: ModelSpec, scheme: Scheme, *, max_model_len: int) -> None:
        super().__init__()
        size, dtype, device = spec.hidden_size, scheme.dtype, scheme.device
        self.embed_tokens = Embedding(spec.vocab_size, size, dtype=dtype, device=device)
        rope = spec.layers[0].attention.rope
        assert rope is not None
        self.rotary = RotaryEmbedding(rope, spec.head_dim, max_model_len, device=device)
        self.layers = nn.ModuleList(DecoderLayer(layer, size, scheme) for layer in spec.layers)
        self.fused: nn.Module | None = None
        self.norm = _norm(spec.norm, size, scheme)

    def forward(
        self, batch: Batch, kv_cache: Sequence[LayerCache], attention: StepAttention
    ) -> Tensor:
        x: Tensor = self.embed_tokens(batch.token_ids)
        residual: Tensor | None = None
        rotary = self.rotary(batch.positions)
        if self.fused is not None:
            x, residual = self.fused(x, rotary, batch, kv_cache)
        else:
            for layer, cache in zip(self.layers, kv_cache, strict=True):
                x, residual = layer(x, residual, rotary, batch.slot_mapping, cache, attention)
        assert residual is not None
        return self.norm.add(x, residual)[0]
