"""CausalLM: the model that `engine.models.build` makes of every spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.layers.attention import LayerCache, StepAttention
from engine.layers.linear.linear import parameter
from engine.layers.rank_group import RankGroup
from engine.layers.scheme import Scheme
from engine.layers.vocabulary import LMHead
from engine.models.batch import Batch
from engine.models.decoder import Decoder
from engine.models.sharding import token_counts
from engine.models.spec import ModelSpec
from engine.nvtx import nvtx_range
from kernels.state.states import StateCache


class CausalLM(nn.Module):
    """A decoder with a head over the vocabulary, or one rank's part of it.

    Args:
        group: the other ranks, if `spec` is one of several; may be None for a model that only has
            shapes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        scheme: Scheme,
        *,
        max_model_len: int,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self._group = group
        self.model = Decoder(spec, scheme, max_model_len=max_model_len, group=group)
        self.lm_head: nn.Module | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = LMHead(
                spec.num_tokens, spec.hidden_size, dtype=scheme.dtype, device=scheme.device
            )
        self.lm_head_bias: nn.Parameter | None = None
        if spec.head_bias:
            self.lm_head_bias = parameter(spec.num_tokens, dtype=scheme.dtype, device=scheme.device)

    def forward(
        self,
        batch: Batch,
        kv_cache: Sequence[LayerCache | StateCache],
        attention: StepAttention,
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

        Only the last dimension is contiguous. Ranks other than 0 get those of their own tokens.
        """
        logits: Tensor
        if self.lm_head is None:
            logits = self.model.embed_tokens.logits(hidden)
        else:
            logits = self.lm_head(hidden).float()
        if self.lm_head_bias is not None:
            logits = logits + self.lm_head_bias
        if self.spec.logit_multiplier != 1.0:
            logits = logits * self.spec.logit_multiplier
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        if self._group is not None:
            sizes = token_counts(self.spec.vocab_size, self._group.size)
            logits = self._group.gather(logits, sizes)
        return logits
