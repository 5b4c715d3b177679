"""Adds the host's adjustments to the logits of a step."""

from __future__ import annotations

from torch import Tensor

from engine.core.schedule import Adjustments
from kernels.sampling import logit_order
from kernels.step.upload import upload, upload_together


def add_adjustments(logits: Tensor, adjustments: Adjustments) -> None:
    """Add them to `logits`, float32 [R, V], in place, without waiting for the device.

    In what changes NaN becomes -inf and infinity the largest float.
    """
    lists = (adjustments.rows, adjustments.token_ids, adjustments.values.view("int32"))
    if len(adjustments.rows):
        rows, token_ids, bits = upload_together(lists, logits.device)
        places = rows.long(), token_ids.long()  # each once
        logits[places] = logit_order.reference(logits[places] + bits.view(logits.dtype))
    # Row by row: nothing is reserved for a copy of all logits.
    for row, values in zip(adjustments.dense_rows.tolist(), adjustments.dense, strict=True):
        added = upload(values.view("int32"), logits.device).view(logits.dtype)
        logits[row] = logit_order.reference(logits[row] + added)
