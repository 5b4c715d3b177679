"""Top-n-sigma and typical-p on a CPU, by the C++ kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import check_contiguous, check_device, check_dtype, check_shape
from kernels.cpu.library import operations


def truncate_rows(
    logits: Tensor, temperature: Tensor, top_n_sigma: Tensor, typical_p: Tensor
) -> None:
    """Set the logits of the tokens that are dropped to -inf, as `truncate_logits` does.

    The kernels must have been built: see `operations`.

    Args:
        logits: float32 [R, V], contiguous. Changed in place.
        temperature: float32 [R]; a row with 0 is left as it is.
        top_n_sigma, typical_p: float32 [R]; 0 and 1 for no limit.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    check_dtype("logits", logits, torch.float32)
    check_shape("logits", logits, (None, None))
    check_contiguous("logits", logits)
    for name, column in (
        ("temperature", temperature),
        ("top_n_sigma", top_n_sigma),
        ("typical_p", typical_p),
    ):
        check_dtype(name, column, torch.float32)
        check_device(name, column, logits.device)
        check_shape(name, column, (logits.shape[0],))
        check_contiguous(name, column)
    fast = operations(logits)
    assert fast is not None, "the CPU kernels are not there"
    fast.truncate(logits, temperature, top_n_sigma, typical_p)
