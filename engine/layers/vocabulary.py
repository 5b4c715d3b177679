"""The matrices with a row per token of the vocabulary: the embedding and the LM head.

And the embedding of positions, in models that learned one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.layers.linear.linear import Linear, parameter
from engine.layers.rank_group import RankGroup

# GEMMs need aligned rows of their result to be fast, and so do kernels that read logits.
_PADDING = 64


def padded_vocab_size(vocab_size: int) -> int:
    """Return the rows that are allocated for `vocab_size` tokens: the next multiple of 64."""
    return -(-vocab_size // _PADDING) * _PADDING


def vocabulary_logits(hidden: Tensor, weight: Tensor, vocab_size: int) -> Tensor:
    """Return float32 logits [R, vocab_size] of `hidden` [R, hidden_size].

    `weight` is [padded_vocab_size(vocab_size), hidden_size], of the dtype of `hidden`. On a GPU the
    products are summed and returned in float32, never rounded to bfloat16: logits that differ stay
    different. Rows of the result are strided there: padding tokens are computed and left out.
    """
    if weight.device.type == "cpu":
        return F.linear(hidden, weight[:vocab_size]).float()
    if weight.dtype == torch.float32:
        return torch.mm(hidden, weight.t())[:, :vocab_size]
    return torch.mm(hidden, weight.t(), out_dtype=torch.float32)[:, :vocab_size]


class Embedding(nn.Module):
    """A vector of `hidden_size` for each of `vocab_size` tokens; also the head of tied models.

    Attributes:
        weight: [padded_vocab_size(vocab_size), hidden_size]; the rows after the vocabulary are 0.
        rows: the part of `weight` for the vocabulary.
        head: a converted copy of `rows` that computes the logits faster; None to use `weight`.

    Args:
        group: other ranks, which have the other tokens; None: there are none.
        first_token: the token of the first row.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        first_token: int = 0,
    ) -> None:
        super().__init__()
        self._vocab_size = vocab_size
        self._group = group
        self._first_token = first_token
        self.weight = parameter(
            padded_vocab_size(vocab_size), hidden_size, dtype=dtype, device=device
        )
        self.weight[vocab_size:].zero_()
        self.head: nn.Module | None = None

    @property
    def rows(self) -> Tensor:
        return self.weight[: self._vocab_size]

    def destinations(self) -> dict[str, Tensor]:
        """Return where the checkpoint's tensor goes, by its name beside this module."""
        return {"embed_tokens.weight": self.rows}

    def forward(self, token_ids: Tensor) -> Tensor:
        """Return [T, hidden_size] for int64 `token_ids` [T]."""
        if self._group is None:
            return F.embedding(token_ids, self.weight)
        rows = token_ids - self._first_token
        is_here = (rows >= 0) & (rows < self._vocab_size)
        found = F.embedding(rows.where(is_here, 0), self.weight)
        return self._group.sum(found.where(is_here[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, vocab_size] of `hidden` [R, hidden_size]."""
        if self.head is None:
            return vocabulary_logits(hidden, self.weight, self._vocab_size)
        logits: Tensor = self.head(hidden)
        return logits.float()


class LMHead(Linear):
    """The head of a model whose embedding is not tied: logits of `vocab_size` tokens.

    `engine.models.process_weights` replaces it after loading by a faster one for its device.

    Attributes:
        weight: [padded_vocab_size(vocab_size), hidden_size]; the rows after the vocabulary are 0.
        rows: the part of `weight` for the vocabulary.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        parts = {"lm_head": padded_vocab_size(vocab_size)}
        super().__init__(hidden_size, parts, bias=False, dtype=dtype, device=device)
        self._vocab_size = vocab_size
        self.weight[vocab_size:].zero_()

    @property
    def rows(self) -> Tensor:
        return self.weight[: self._vocab_size]

    def forward(self, x: Tensor) -> Tensor:
        """Return float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        return vocabulary_logits(x, self.weight, self._vocab_size)

    def destinations(self) -> dict[str, Tensor]:
        return {"lm_head.weight": self.rows}


class PositionEmbedding(nn.Module):
    """A learned vector of `hidden_size` for each of `size` rows; position 0 is row `offset`."""

    def __init__(
        self, size: int, offset: int, hidden_size: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._offset = offset
        self.weight = parameter(size, hidden_size, dtype=dtype, device=device)

    def forward(self, positions: Tensor) -> Tensor:
        """Return [T, hidden_size] for int64 `positions` [T]."""
        return F.embedding(positions + self._offset, self.weight)
