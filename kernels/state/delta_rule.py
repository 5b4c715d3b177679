"""The gated delta rule (Yang et al., 2024, Gated DeltaNet) as Qwen3-Next, 3.5 and 3.6 use it.

Queries, keys and values go through a causal convolution of each channel and SiLU; queries and keys
are then l2-normalised. The state S [K, V] of a value head maps keys to values. Each token lets it
decay, and replaces what it returns for the token's key by a mixture with the token's value:

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  o = S^T q

The result is normalised, weighted and multiplied by an activation of the gate z.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import cpu, device
from kernels.checks import (
    FLOATS,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_stride,
    check_like,
    check_shape,
)
from kernels.state import delta_chunks, delta_decode
from kernels.state.delta_decode import L2_EPS
from kernels.state.rings import write_rings
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

Gate = Literal["silu", "sigmoid"]


def gated_delta_rule(
    qkv: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    decay_inputs: Tensor,
    *,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    num_key_heads: int,
    gate: Gate,
    cache: StateCache,
    step: StepStates,
    is_invariant: bool = False,
) -> Tensor:
    """Return the heads' results for a step's tokens; read and write their states in `cache`.

    On a CPU, and if `is_invariant`, a token's result and the states depend, to the last bit, on its
    sequence alone: not on how that is cut into steps, nor on the other rows. Otherwise rows of
    several tokens are computed in sub-chunks, cut at the multiples of 64 of the positions: then
    they depend on the sequence, and on the positions at which it was cut into rows.

    Args:
        qkv: float [T, C]: queries [num_key_heads, K], keys [num_key_heads, K] and values [H, V] of
            each token side by side, before the convolution, as the ring holds them. H is a multiple
            of `num_key_heads`: value head i uses key head i // (H // num_key_heads). Tokens may be
            strided, here and in the next three.
        z: [T, H * V], of the dtype of `qkv`.
        beta_logits: [T, H], of the dtype of `qkv`; beta is their sigmoid.
        decay_inputs: [T, H], of the dtype of `qkv`; g = decay * softplus(decay_inputs + dt_bias).
        conv_weight: [C, kernel size], of the dtype of `qkv`: the taps of each channel, the last of
            them for the token itself. The transpose of a contiguous tensor saves a copy.
        decay: float32 [H], -exp(A_log).
        dt_bias: float [H]. On a CPU float32 saves a conversion, of the next too.
        norm_weight: float [V].
        norm_eps: added to the mean square of a head's result.
        num_key_heads: heads of queries and of keys.
        gate: activation of z.
        cache: ring [N, R, C], state [N, H, K, V].
        step: rows of the step, and the blocks of their states.
        is_invariant: on a GPU compute all rows token by token, prompts too.

    Returns:
        [T, H * V] in the dtype of `qkv`, contiguous; computed in float32 and rounded once. Zeros
        for padding and for the tokens of idle rows.

    Raises:
        ValueError: an argument has a wrong shape, dtype, stride or device.
    """
    _check_tokens(qkv, z, beta_logits, decay_inputs)
    _check_weights(qkv, beta_logits, conv_weight, decay, dt_bias, norm_weight)
    _check_heads(z, conv_weight, beta_logits, norm_weight, num_key_heads, cache)
    if gate not in ("silu", "sigmoid"):
        raise ValueError(f"gate: must be silu or sigmoid (got {gate!r})")
    check_states(cache, step, qkv, *conv_weight.shape)
    if device.runs_triton(qkv):
        assert cache.state is not None
        conv_weight = conv_weight.t().contiguous().t()
        arguments: dict[str, Any] = {
            "x_ptr": qkv,
            "z_ptr": z,
            "beta_ptr": beta_logits,
            "inputs_ptr": decay_inputs,
            "conv_ptr": conv_weight,
            "decay_ptr": decay,
            "bias_ptr": dt_bias,
            "norm_ptr": norm_weight,
            "x_stride": qkv.stride(0),
            "z_stride": z.stride(0),
            "beta_stride": beta_logits.stride(0),
            "inputs_stride": decay_inputs.stride(0),
            "channel_stride": conv_weight.stride(0),
            "tap_stride": conv_weight.stride(1),
            "eps": norm_eps,
            "KEY_HEADS": num_key_heads,
            "HEADS": beta_logits.shape[1],
            "KEY": cache.state.shape[2],
            "VALUE": len(norm_weight),
            "KERNEL": conv_weight.shape[1],
            "GATE": gate,
        }
        return _launch(arguments, z, cache, step, is_invariant)
    if (fast := cpu.operations(qkv)) is not None:
        out: Tensor = fast.gated_delta_rule(
            qkv,
            z,
            beta_logits,
            decay_inputs,
            conv_weight.t().contiguous(),
            decay,
            dt_bias.float(),
            norm_weight.float(),
            norm_eps,
            num_key_heads,
            gate == "sigmoid",
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
        qkv,
        z,
        beta_logits,
        decay_inputs,
        conv_weight=conv_weight,
        decay=decay,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        num_key_heads=num_key_heads,
        gate=gate,
        cache=cache,
        step=step,
    ).to(qkv.dtype)


def reference(
    qkv: Tensor,
    z: Tensor,
    beta_logits: Tensor,
    decay_inputs: Tensor,
    *,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    num_key_heads: int,
    gate: Gate,
    cache: StateCache,
    step: StepStates,
) -> Tensor:
    """Return the results in float32, not rounded; write the states as `gated_delta_rule` does.

    All but the convolution is computed token by token: the last bits of torch's exponentials and
    sums depend on the shape of a tensor.
    """
    assert cache.state is not None
    heads, value_dim = beta_logits.shape[1], len(norm_weight)
    out = torch.zeros(z.shape, dtype=torch.float32, device=z.device)
    for row in step_rows(step):
        inputs = with_history(cache.ring, row, qkv[row.begin : row.end])
        mixed = convolve_tokens(inputs, conv_weight, None, row.end - row.begin)
        state = cache.state[row.reads]
        for t, token in enumerate(range(row.begin, row.end)):
            query, key, value = _heads(F.silu(mixed[t]), num_key_heads, heads, value_dim)
            step_size = F.softplus(decay_inputs[token].float() + dt_bias.float())
            state = state * (decay * step_size).exp()[:, None, None]
            known = (state * key[:, :, None]).sum(1)  # [H, V]
            beta = beta_logits[token].float().sigmoid()[:, None]
            state = state + key[:, :, None] * (beta * (value - known))[:, None, :]
            result = (state * query[:, :, None]).sum(1)
            gates = z[token].float().unflatten(0, (heads, value_dim))
            out[token] = _gated_norm(result, norm_weight, norm_eps, gates, gate).flatten()
            for position, block in row.saves:
                if position == row.start + t + 1:
                    cache.state[block] = state
        cache.state[row.writes] = state
        store_row_rings(cache.ring, row, inputs)
    return out


def _heads(
    qkv: Tensor, num_key_heads: int, num_heads: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query [H, K], key [H, K] and value [H, V] of a token's float32 [C]."""
    values = num_heads * value_dim
    keys = (len(qkv) - values) // 2
    query, key, value = qkv.split((keys, keys, values))
    ratio = num_heads // num_key_heads
    query, key = (
        (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(ratio, 0)
        for x in (query.view(num_key_heads, -1), key.view(num_key_heads, -1))
    )
    return query * query.shape[1] ** -0.5, key, value.view(num_heads, value_dim)


def _gated_norm(x: Tensor, weight: Tensor, eps: float, gates: Tensor, gate: Gate) -> Tensor:
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed * (F.silu(gates) if gate == "silu" else gates.sigmoid())


def _launch(
    arguments: dict[str, Any], z: Tensor, cache: StateCache, step: StepStates, is_invariant: bool
) -> Tensor:
    if not len(step.seq_lens) or not len(z):
        return torch.zeros(z.shape, dtype=z.dtype, device=z.device)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    delta_decode.launch(arguments, cache, step, out, all_rows=is_invariant)
    sub_chunks = step.sub_chunks_of(len(z))
    if len(sub_chunks.items):
        if not is_invariant:
            delta_chunks.launch(arguments, cache, step, sub_chunks, out)
        write_rings(arguments["x_ptr"], cache, step, gated=False)
    return out


def _check_tokens(qkv: Tensor, z: Tensor, beta_logits: Tensor, decay_inputs: Tensor) -> None:
    check_dtype("qkv", qkv, *FLOATS)
    check_shape("qkv", qkv, (None, None))
    tokens = len(qkv)
    check_shape("z", z, (tokens, None))
    check_shape("beta_logits", beta_logits, (tokens, None))
    check_shape("decay_inputs", decay_inputs, tuple(beta_logits.shape))
    for name, tensor in (
        ("z", z),
        ("beta_logits", beta_logits),
        ("decay_inputs", decay_inputs),
    ):
        check_like(name, tensor, qkv)
        check_last_stride(name, tensor)
    check_last_stride("qkv", qkv)


def _check_weights(
    qkv: Tensor,
    beta_logits: Tensor,
    conv_weight: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
) -> None:
    heads = beta_logits.shape[1]
    check_shape("conv_weight", conv_weight, (qkv.shape[1], None))
    check_like("conv_weight", conv_weight, qkv)
    check_dtype("decay", decay, torch.float32)
    for name, tensor, shape in (
        ("decay", decay, (heads,)),
        ("dt_bias", dt_bias, (heads,)),
        ("norm_weight", norm_weight, (None,)),
    ):
        check_shape(name, tensor, shape)
        check_dtype(name, tensor, *FLOATS)
        check_device(name, tensor, qkv.device)
        check_contiguous(name, tensor)


def _check_heads(
    z: Tensor,
    conv_weight: Tensor,
    beta_logits: Tensor,
    norm_weight: Tensor,
    num_key_heads: int,
    cache: StateCache,
) -> None:
    heads, value_dim = beta_logits.shape[1], len(norm_weight)
    if num_key_heads < 1 or heads < 1 or heads % num_key_heads:
        raise ValueError(f"num_key_heads: must divide {heads} heads (got {num_key_heads})")
    channels, kernel_size = conv_weight.shape
    keys = channels - heads * value_dim
    if keys < 1 or keys % (2 * num_key_heads) or not value_dim or not kernel_size:
        raise ValueError(
            f"conv_weight: must have the channels of {num_key_heads} queries and keys beside "
            f"{heads} values of {value_dim} (got shape {list(conv_weight.shape)})"
        )
    check_shape("z", z, (None, heads * value_dim))
    check_head_states(cache, (heads, keys // (2 * num_key_heads), value_dim), z)
