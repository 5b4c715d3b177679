"""The precision of torch's matrix products on a GPU, which torch keeps for the whole process."""

from __future__ import annotations

import torch


def require_full_precision() -> None:
    """Have products summed in float32, and products of float32 multiplied in float32.

    By default partial sums of a split bfloat16 or float16 product are rounded to that type before
    they are added.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False
    products.allow_tf32 = False
