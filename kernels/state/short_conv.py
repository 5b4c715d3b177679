"""The short convolution of LFM2 (Liquid AI, 2025): `C * conv(B * x)`, gated before and behind.

Of three projections of a token, B, C and x, the product of B and x goes through a causal
convolution of each channel over the last few tokens, whose result C multiplies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import cpu
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.state.states import (
    StateCache,
    StepStates,
    check_states,
    convolve,
    step_rows,
    store_rings,
    with_history,
)


def short_conv(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> Tensor:
    """Return the gated convolutions of a step's tokens; read and write their rings in `cache`.

    A token's result and the rings depend, to the last bit, on its sequence alone: not on how that
    is cut into steps, nor on the other rows.

    Args:
        projected: float [T, 3 * C]: B, C and x of each token side by side. Tokens may be strided.
        weight: [C, kernel size], of the dtype of `projected`: the taps of each channel, the last
            of them for the token itself. On a CPU the transpose of a contiguous tensor saves a
            copy.
        bias: [C] of the same dtype, added to the convolution, or None.
        cache: ring [N, R, C], which holds B * x; its state is not used.
        step: rows of the step, and the blocks of their states.

    Returns:
        [T, C] in the dtype of `projected`, contiguous: B * x is rounded, convolved in float32,
        rounded, and multiplied by C. Zeros for padding and for the tokens of idle rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(projected, weight, bias, cache, step)
    if (fast := cpu.operations(projected)) is not None:
        out: Tensor = fast.short_conv(
            projected,
            weight.t().contiguous(),
            bias,
            cache.ring,
            step.query_start_loc,
            step.seq_lens,
            step.reads,
            step.writes,
            step.saves,
        )
        return out
    return reference(projected, weight, bias, cache, step).to(projected.dtype)


def reference(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> Tensor:
    """Return the results in float32, not rounded at last; write the rings as `short_conv` does."""
    inner, gate, x = projected.chunk(3, dim=-1)
    out = torch.zeros(gate.shape, dtype=torch.float32, device=gate.device)
    for row in step_rows(step):
        tokens = slice(row.begin, row.end)
        inputs = with_history(cache.ring, row, inner[tokens] * x[tokens])
        mixed = convolve(inputs, weight, bias, row.end - row.begin).to(projected.dtype)
        out[tokens] = gate[tokens].float() * mixed.float()
        store_rings(cache.ring, row, inputs)
    return out


def _check(
    projected: Tensor, weight: Tensor, bias: Tensor | None, cache: StateCache, step: StepStates
) -> None:
    check_dtype("projected", projected, *FLOATS)
    check_shape("weight", weight, (None, None))
    channels, kernel_size = weight.shape
    if not channels or not kernel_size:
        raise ValueError(f"weight: must not be empty (got shape {list(weight.shape)})")
    check_shape("projected", projected, (None, 3 * channels))
    check_last_stride("projected", projected)
    check_like("weight", weight, projected)
    if bias is not None:
        check_shape("bias", bias, (channels,))
        check_like("bias", bias, projected)
        check_contiguous("bias", bias)
    check_states(cache, step, projected, channels, kernel_size)
