"""State space duality (Mamba 2; Dao and Gu, 2024): a state that decays, and takes each token in.

Inputs x, B and C of a token go through a causal convolution of each channel and SiLU. The state
S [K, V] of a head maps C to its result; B and C are common to a group of heads:

    dt = softplus(dt + bias), limited;  S <- exp(dt A) S + B (dt x)^T;  y = S^T C + D x
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cpu
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.state.states import (
    StateCache,
    StepStates,
    check_head_states,
    check_states,
    convolve_tokens,
    step_rows,
    store_row_rings,
    with_history,
)


def ssd(
    inputs: Tensor,
    time_steps: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
    skip: Tensor,
    num_groups: int,
    cache: StateCache,
    step: StepStates,
) -> Tensor:
    """Return the heads' results for a step's tokens; read and write their states in `cache`.

    A token's result and the states depend, to the last bit, on its sequence alone: not on how that
    is cut into steps, nor on the other rows.

    Args:
        inputs: float [T, C]: x [H, V], B [num_groups, K] and C [num_groups, K] of each token side
            by side, before the convolution, as the ring holds them. Head i uses group
            i // (H // num_groups). Tokens may be strided, here and in the next.
        time_steps: [T, H], of the dtype of `inputs`.
        conv_weight: [C, kernel size], of the dtype of `inputs`: the taps of each channel, the last
            for the token itself. On a CPU the transpose of a contiguous tensor saves a copy.
        conv_bias: [C] of the same dtype, or None.
        decay: float32 [H], A: -exp(A_log).
        dt_bias: float [H]. On a CPU float32 saves a conversion, of `skip` too.
        dt_limits: least and largest dt.
        skip: float [H], D.
        num_groups: of heads; divides H.
        cache: ring [N, R, C], state [N, H, K, V].
        step: rows of the step, and the blocks of their states.

    Returns:
        float32 [T, H * V], contiguous. Zeros for padding and for the tokens of idle rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check(inputs, time_steps, conv_weight, conv_bias, decay, dt_bias, skip)
    check_states(cache, step, inputs, *conv_weight.shape)
    _check_heads(inputs, decay, num_groups, cache)
    if (fast := cpu.operations(inputs)) is not None:
        out: Tensor = fast.ssd(
            inputs,
            time_steps,
            conv_weight.t().contiguous(),
            conv_bias,
            decay,
            dt_bias.float(),
            *dt_limits,
            skip.float(),
            num_groups,
            cache.ring,
            cache.state,
            step.query_start_loc,
            step.seq_lens,
            step.reads,
            step.writes,
            step.saves,
        )
        return out
    return reference(
        inputs,
        time_steps,
        conv_weight=conv_weight,
        conv_bias=conv_bias,
        decay=decay,
        dt_bias=dt_bias,
        dt_limits=dt_limits,
        skip=skip,
        num_groups=num_groups,
        cache=cache,
        step=step,
    )


def reference(
    inputs: Tensor,
    time_steps: Tensor,
    *,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
    skip: Tensor,
    num_groups: int,
    cache: StateCache,
    step: StepStates,
) -> Tensor:
    """Return what `ssd` does and write its states, in torch.

    All but the convolution is computed token by token: the last bits of torch's exponentials and
    sums depend on the shape of a tensor.
    """
    assert cache.state is not None
    heads, key_dim, value_dim = cache.state.shape[1:]
    out = inputs.new_zeros((len(inputs), heads, value_dim), dtype=torch.float32)
    parts = [heads * value_dim, num_groups * key_dim, num_groups * key_dim]
    for row in step_rows(step):
        tokens = slice(row.begin, row.end)
        ring_inputs = with_history(cache.ring, row, inputs[tokens])
        mixed = convolve_tokens(ring_inputs, conv_weight, conv_bias, row.end - row.begin)
        state = cache.state[row.reads]
        for t, token in enumerate(range(row.begin, row.end)):
            x, b, c = F.silu(mixed[t]).split(parts)
            x = x.view(heads, value_dim)
            b, c = (
                each.view(num_groups, key_dim).repeat_interleave(heads // num_groups, 0)
                for each in (b, c)
            )
            dt = F.softplus(time_steps[token].float() + dt_bias.float()).clamp(*dt_limits)
            state = state * (dt * decay).exp()[:, None, None]
            state = state + b[:, :, None] * (dt[:, None] * x)[:, None, :]
            out[token] = (state * c[:, :, None]).sum(1) + skip.float()[:, None] * x
            for position, block in row.saves:
                if position == row.start + t + 1:
                    cache.state[block] = state
        cache.state[row.writes] = state
        store_row_rings(cache.ring, row, ring_inputs)
    return out.flatten(1)


def _check(
    inputs: Tensor,
    time_steps: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    decay: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
) -> None:
    check_shape("inputs", inputs, (None, None))
    check_dtype("inputs", inputs, *FLOATS)
    check_last_stride("inputs", inputs)
    tokens, channels = inputs.shape
    check_shape("decay", decay, (None,))
    check_dtype("decay", decay, torch.float32)
    heads = len(decay)
    check_shape("time_steps", time_steps, (tokens, heads))
    check_like("time_steps", time_steps, inputs)
    check_last_stride("time_steps", time_steps)
    check_shape("conv_weight", conv_weight, (channels, None))
    check_like("conv_weight", conv_weight, inputs)
    if conv_bias is not None:
        check_shape("conv_bias", conv_bias, (channels,))
        check_like("conv_bias", conv_bias, inputs)
        check_contiguous("conv_bias", conv_bias)
    for name, tensor in (("dt_bias", dt_bias), ("skip", skip)):
        check_shape(name, tensor, (heads,))
        check_dtype(name, tensor, *FLOATS)
    for name, tensor in (("decay", decay), ("dt_bias", dt_bias), ("skip", skip)):
        check_device(name, tensor, inputs.device)
        check_contiguous(name, tensor)


def _check_heads(inputs: Tensor, decay: Tensor, num_groups: int, cache: StateCache) -> None:
    heads, channels = len(decay), inputs.shape[1]
    if num_groups < 1 or heads % num_groups:
        raise ValueError(f"num_groups: must divide {heads} heads (got {num_groups})")
    key_dim, value_dim = check_head_states(cache, (heads, None, None), inputs).shape[2:]
    if heads * value_dim + 2 * num_groups * key_dim != channels:
        raise ValueError(
            f"inputs: must have {heads} x {value_dim} + 2 x {num_groups} x {key_dim} channels "
            f"(got {channels})"
        )
