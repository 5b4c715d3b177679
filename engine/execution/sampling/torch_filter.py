"""Top-k, min-p and top-p on a CPU, with few sorts: mostly, what they leave is a few tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FEW = 512  # tokens that are looked at before a row is sorted as a whole


class TorchFilter(NamedTuple):
    """The filters of R rows, [R, 1] each, as in `SamplingParams`.

    They act one after the other, on the tokens sorted by falling probability and rising index: the
    first top_k stay; of these, those with at least min_p of the largest probability; of these, each
    before which there is less than top_p of the probability that is left.
    """

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    def apply(self, probs: Tensor) -> Tensor:
        """Return `probs`, float64 [R, V], with 0 for all tokens that are left out."""
        total = probs.sum(dim=-1, keepdim=True)
        ranked, token_ids = _largest(probs, min(_FEW, probs.shape[-1]))
        kept, done = self._keep(ranked, total)
        out = _back(probs, ranked, token_ids, kept)
        rest = (~done).nonzero()[:, 0]
        if len(rest):
            probs = probs[rest]
            ranked, token_ids = probs.sort(dim=-1, descending=True, stable=True)
            whole = TorchFilter(*(column[rest] for column in self))
            kept, _ = whole._keep(ranked, total[rest])
            out[rest] = _back(probs, ranked, token_ids, kept)
        return out

    def _keep(self, ranked: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of the first tokens, [R, N], stay, and for which rows this is all, [R].

        `total` is the probability of all tokens, [R, 1].
        """
        rank = torch.arange(ranked.shape[-1])
        left = (rank < self.top_k) | (self.top_k == 0)
        left &= ranked >= self.min_p * ranked[:, :1]
        masses = ranked.masked_fill(~left, 0.0)
        goes_on = left[:, -1:]
        mass = torch.where(goes_on, total, masses.sum(dim=-1, keepdim=True))
        before = masses.cumsum(dim=-1) - masses
        kept = left & ((before < self.top_p * mass) | (self.top_p >= 1))
        # Beyond the first tokens there may be more that are as likely as the last of them.
        ends = ~(kept & (ranked == ranked[:, -1:])).any(dim=-1, keepdim=True)
        knows_mass = ~goes_on | ((self.top_k == 0) & (self.min_p == 0))
        return kept, (ends & knows_mass)[:, 0]


def _largest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens by probability, equal ones by index: values and indices [R, count].

    Which of those as likely as the last are among them is not defined.
    """
    token_ids = probs.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ranked, order = probs.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ranked, token_ids.gather(-1, order)


def _back(probs: Tensor, ranked: Tensor, token_ids: Tensor, kept: Tensor) -> Tensor:
    """Return what is kept in the order of the vocabulary, as rows without filters have it."""
    return torch.zeros_like(probs).scatter_(-1, token_ids, ranked.masked_fill(~kept, 0.0))
