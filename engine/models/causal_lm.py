"""The decoder that Llama, Mistral and Qwen share. Module names follow the checkpoints' tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.layers.attention import Attention, LayerCache, StepAttention
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryEmbedding
from engine.layers.vocabulary import Embedding, LMHead
from engine.models.batch import Batch
from engine.models.model_config import ModelConfig
from engine.nvtx import nvtx_range


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

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
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            sliding_window=sliding_window,
            qk_norm=qk_norm,
            norm_eps=eps,
            dtype=dtype,
            device=device,
        )
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(
            size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, device=device
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
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, rotary, slot_mapping, cache, attention)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Attributes:
        fused: runs all layers in one operation, from their tensors and the batch alone; None: the
            layers run one by one.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        qk_norm: bool,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        size = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, max_model_len, device=device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, sliding_window=window, qk_norm=qk_norm, dtype=dtype, device=device)
            for window in config.sliding_windows
        )
        self.fused: nn.Module | None = None
        self.norm = RMSNorm(size, config.rms_norm_eps, dtype=dtype, device=device)

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


class CausalLM(nn.Module):
    """A decoder with a head over the vocabulary. Families differ in the class attributes."""

    qk_norm = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(
            config, qk_norm=self.qk_norm, max_model_len=max_model_len, dtype=dtype, device=device
        )
        self.lm_head: nn.Module | None = None
        if not config.tie_word_embeddings:
            self.lm_head = LMHead(config.vocab_size, config.hidden_size, dtype=dtype, device=device)

    def forward(
        self, batch: Batch, kv_cache: Sequence[LayerCache], attention: StepAttention
    ) -> Tensor:
        """Run one step; writes the keys and values of its T tokens to `kv_cache`.

        Args:
            batch: the tokens, and where their keys and values go.
            kv_cache: one entry per layer.
            attention: planned for `batch`.

        Returns:
            Hidden states after the final norm, [T, hidden_size] in the model's dtype.
        """
        hidden: Tensor = self.model(batch, kv_cache, attention)
        return hidden

    @nvtx_range("head")
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, vocab_size] of the `hidden` rows [R, hidden_size].

        Only the last dimension is contiguous.
        """
        if self.lm_head is None:
            return self.model.embed_tokens.logits(hidden)
        logits: Tensor = self.lm_head(hidden)
        return logits.float()
