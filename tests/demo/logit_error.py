"""How far the logits of two models of the same shape are from each other, on the same text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.execution.attention.backend import attention_backend
from engine.execution.memory.kv_caches import allocate_kv_cache
from engine.models.batch import Batch
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.kv_groups import KVGroups
from engine.models.registry import read_model_spec
from engine.weights import as_stored, load_weights

CPU = torch.device("cpu")
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LogitError:
    """Difference between the logits of one model and those that are wanted.

    Attributes:
        perplexity: of the model that is right, on the labels.
        found_perplexity: of the other.
        agreement: share of the labels where both have the same most likely token.
        relative_error: of all logits, RMS of the difference / RMS of the logits.
    """

    perplexity: float
    found_perplexity: float
    agreement: float
    relative_error: float

    @property
    def perplexity_ratio(self) -> float:
        return self.found_perplexity / self.perplexity


def logit_errors(
    model: CausalLM, references: Sequence[CausalLM], text: Iterable[tuple[Tensor, Tensor]]
) -> list[LogitError]:
    """Compare the logits of every position of `text` with those of each reference.

    Args:
        text: token ids and labels, each [rows, length]. A label is the token itself, or negative if
            it is not to be predicted.
    """
    sums = [_Sums() for _ in references]
    for token_ids, labels in text:
        found = _logits(model, token_ids)
        for reference, own in zip(references, sums, strict=True):
            own.add(found, _logits(reference, token_ids), labels)
    return [own.error() for own in sums]


class _Sums:
    """What a `LogitError` is made of, of all text so far."""

    def __init__(self) -> None:
        self._losses = torch.zeros(2, dtype=torch.float64)
        self._squares = torch.zeros(2, dtype=torch.float64)
        self._num_predicted = self._num_agreed = 0

    def add(self, found: Tensor, wanted: Tensor, labels: Tensor) -> None:
        self._squares += torch.stack([(found - wanted).square().sum(), wanted.square().sum()])
        is_predicted = labels[:, 1:] >= 0
        targets = labels[:, 1:][is_predicted]
        pair = [logits[:, :-1][is_predicted] for logits in (wanted, found)]
        self._losses += torch.stack([F.cross_entropy(p, targets, reduction="sum") for p in pair])
        self._num_agreed += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        self._num_predicted += len(targets)

    def error(self) -> LogitError:
        means: list[float] = (self._losses / self._num_predicted).tolist()
        return LogitError(
            perplexity=math.exp(means[0]),
            found_perplexity=math.exp(means[1]),
            agreement=self._num_agreed / self._num_predicted,
            relative_error=(self._squares[0] / self._squares[1]).sqrt().item(),
        )


def load_on_cpu(checkpoint: Path, dtype: torch.dtype) -> CausalLM:
    """Return the model of a checkpoint in floating point, before conversion."""
    spec = as_stored(read_model_spec(checkpoint), checkpoint)
    model = build_model(spec, max_model_len=spec.context_length, dtype=dtype, device=CPU)
    load_weights(model, checkpoint)
    return model


@torch.inference_mode()
def _logits(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Return the logits of `token_ids` [rows, length], [rows, length, vocab_size]."""
    rows, length = token_ids.shape
    width = -(-length // _BLOCK_SIZE)
    dtype = model.model.embed_tokens.weight.dtype
    cache = allocate_kv_cache(
        1 + rows * width,
        _BLOCK_SIZE,
        groups=KVGroups.single(model.spec.num_layers),
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=dtype,
        device=CPU,
    )
    tables = 1 + torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    positions = torch.arange(length)
    blocks = tables.long()[:, positions // _BLOCK_SIZE]
    batch = Batch(
        token_ids=token_ids.flatten(),
        positions=positions.repeat(rows),
        slot_mapping=(blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE).flatten(),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * length,
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
    )
    attention = attention_backend(CPU, dtype=dtype, block_size=_BLOCK_SIZE).plan(batch)
    return model.compute_logits(model(batch, cache, attention)).view(rows, length, -1)
