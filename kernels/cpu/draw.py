"""Sampling of one token per row on a CPU, by the C++ kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.cpu.library import operations


def draw_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    """Return a token per row of `logits`, float32 [R, V] with V > 0: int64 [R].

    The filters are applied in turn to the tokens sorted by descending probability and ascending
    index: the first top_k stay; of these, those with at least min_p of the largest probability; of
    these, those before which the cumulative renormalised probability is below top_p. The
    distribution of the remaining tokens, in vocabulary order, is inverted at `uniform`. Rows with
    NaN, or with -inf only, get the last token. The kernels must have been built: see `operations`.

    Args:
        temperature: float64 [R]; 0 is greedy, regardless of the filters.
        top_k: int32 [R]; 0 for no limit.
        top_p, min_p: float64 [R]; 1 and 0 for no limit.
        uniform: float64 [R], in [0, 1).

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_contiguous("logits", logits)
    for name, column, dtype in (
        ("temperature", temperature, torch.float64),
        ("top_k", top_k, torch.int32),
        ("top_p", top_p, torch.float64),
        ("min_p", min_p, torch.float64),
        ("uniform", uniform, torch.float64),
    ):
        check_dtype(name, column, dtype)
        check_device(name, column, logits.device)
        check_shape(name, column, (logits.shape[0],))
        check_contiguous(name, column)
    fast = operations(logits)
    assert fast is not None, "the CPU kernels are not there"
    token_ids: Tensor = fast.draw(logits, temperature, top_k, top_p, min_p, uniform)
    return token_ids
