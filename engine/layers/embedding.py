"""Token embedding, which also computes the logits of models with tied embeddings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear import parameter


class Embedding(nn.Module):
    """A vector of `hidden_size` for each of `vocab_size` tokens.

    Attributes:
        head: a converted copy of `weight` that computes the logits faster; None to use `weight`.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size, dtype=dtype, device=device)
        self.head: nn.Module | None = None

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [T, hidden_size] for int64 `token_ids` [T]."""
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the products of `hidden` [R, hidden_size] with every token's vector."""
        if self.head is None:
            return F.linear(hidden, self.weight)
        logits: Tensor = self.head(hidden)
        return logits
