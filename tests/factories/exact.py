"""Reference models without rounding to speak of, and bounds on errors that follow from them.

How far two correct computations in float32 lie apart depends on the model, on the tokens and on
the order in which a processor sums. So no constant bounds it. What does is the distance of the
reference itself, computed in the same type, from the same model in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import BambaForCausalLM, DynamicCache, PreTrainedModel

# Sums in another order have other errors of the same size. Over many values that hardly differs;
# the largest of them varies more.
_RMS_FACTOR = 4
_MAX_FACTOR = 10


class ExactModel:
    """A copy of transformers' `model` that computes everything in float64.

    So do the parts that transformers always computes in float32: rotary tables and norms.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = deepcopy(model.config)
        config._experts_implementation = "eager"  # the grouped products have no float64
        with _float64_throughout():
            self._model = type(model)(config).double().eval()
        self._model.load_state_dict(model.state_dict())

    @torch.inference_mode()
    def logits(self, token_ids: list[int], num_prompt_tokens: int | None = None) -> Tensor:
        """Return the logits of every position, float64 [len, vocab_size].

        The first `num_prompt_tokens` are computed at once, and those behind them one by one; by
        default all are computed at once. With dynamic rope scaling that makes a difference.
        """
        with _float64_throughout():
            return decoded_logits(self._model, token_ids, num_prompt_tokens)


@torch.inference_mode()
def decoded_logits(
    model: PreTrainedModel, token_ids: list[int], num_prompt_tokens: int | None = None
) -> Tensor:
    """Return the logits of every position, as `ExactModel.logits`, in the type of `model`."""
    new, *rest = torch.tensor([token_ids]).tensor_split([num_prompt_tokens or len(token_ids)], 1)
    cache = DynamicCache(config=model.config)
    chunks = (new, *(part for part in rest[0].split(1, dim=1) if part.numel()))
    return torch.cat([cached_logits(model, chunk, cache)[0] for chunk in chunks])


def cached_logits(model: PreTrainedModel, token_ids: Tensor, cache: DynamicCache) -> Tensor:
    """Return the logits of `token_ids` [1, len], which follow those in `cache` and are added to it.

    The argument for the cache has had this name since transformers 5.24.
    """
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    given: dict[str, Any] = {name: cache}
    if isinstance(model, BambaForCausalLM):  # which counts positions from 0 in each call
        start = cache.get_seq_length()
        given["position_ids"] = torch.arange(start, start + token_ids.shape[1])[None]
    logits: Tensor = model(token_ids, use_cache=True, **given).logits
    return logits


def assert_as_accurate(found: Tensor, reference: Tensor, exact: Tensor) -> None:
    """Assert that `found` is as near to `exact` as `reference` is, within a small factor.

    Args:
        found, reference: many values, of any shape, computed in the same type.
        exact: float64.
    """
    assert found.dtype == reference.dtype
    assert found.shape == exact.shape
    error, bound = _rms(found - exact), _RMS_FACTOR * _rms(reference - exact)
    assert error <= bound, f"RMS error {error:.2e} > {bound:.2e}"
    largest, bound = (found - exact).abs().max().item(), max_error(reference, exact)
    assert largest <= bound, f"largest error {largest:.2e} > {bound:.2e}"


def max_error(reference: Tensor, exact: Tensor) -> float:
    """Return how far a value computed in the type of `reference` may be from the exact one.

    Args:
        reference: many such values, of any shape.
        exact: float64.
    """
    assert exact.dtype == torch.float64 != reference.dtype
    assert reference.shape == exact.shape
    return _MAX_FACTOR * (reference - exact).abs().max().item()


def _rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@contextmanager
def _float64_throughout() -> Iterator[None]:
    """Give float64 to code that asks for float32 by name."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(torch, "float32", torch.float64),
            patch.object(torch, "float", torch.float64),
            patch.object(Tensor, "float", Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(default)
