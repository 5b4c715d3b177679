"""State layers of hybrid models: rows of one token next to torch's, and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.bench.kernels.case import Aim, Case, Work, numel_bytes, randn
from kernels.state.delta_rule import gated_delta_rule
from kernels.state.short_conv import short_conv
from kernels.state.states import StateCache, StepStates
from kernels.state.sub_chunks import index_sub_chunks

_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a gated delta rule.

    Attributes:
        key_heads, heads: of queries and keys, and of values.
        key, value: their sizes.
        kernel: taps of the convolution.
    """

    key_heads: int
    heads: int
    key: int
    value: int
    kernel: int
    dtype: torch.dtype = torch.bfloat16


def _step(counts: list[int], device: torch.device) -> StepStates:
    """Return a step whose rows begin sequences or, of one token, continue such of 1k tokens."""
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    lengths = torch.tensor(counts, dtype=torch.int32, device=device)
    blocks = torch.arange(1, len(counts) + 1, dtype=torch.int32, device=device)
    saves = torch.full((len(counts), 4, 2), -1, dtype=torch.int32, device=device)
    decodes = counts.count(1)
    index = index_sub_chunks(starts, lengths, blocks, sum(counts), num_decodes=decodes)
    seq_lens = torch.where(lengths == 1, 1024, lengths)
    reads = torch.where(lengths == 1, blocks, 0)
    return StepStates(starts, seq_lens, reads, blocks, saves, index)


def _delta(counts: list[int], heads: Heads, device: torch.device) -> Work:
    tokens, values = sum(counts), heads.heads * heads.value
    channels = 2 * heads.key_heads * heads.key + values
    fill = partial(randn, dtype=heads.dtype, device=device)
    # Views of fused projections, as in the model.
    qkv, z = fill(tokens, channels + values).split([channels, values], 1)
    beta, inputs = fill(tokens, 2 * heads.heads, seed=1).chunk(2, 1)
    blocks = len(counts) + 1
    ring = fill(blocks, heads.kernel, channels, seed=2)
    wide = partial(randn, dtype=torch.float32, device=device)
    state = wide(blocks, heads.heads, heads.key, heads.value, seed=3)
    ring[0], state[0] = 0, 0
    step = _step(counts, device)
    arguments = (qkv, z, beta, inputs)
    weights: dict[str, Any] = {
        "conv_weight": fill(heads.kernel, channels, seed=4).t(),
        "decay": -wide(heads.heads, seed=5).exp(),
        "dt_bias": wide(heads.heads, seed=6),
        "norm_weight": wide(heads.value, seed=7),
        "norm_eps": _EPS,
        "num_key_heads": heads.key_heads,
    }
    cache = StateCache(ring, state)
    ours = partial(gated_delta_rule, *arguments, **weights, gate="silu", cache=cache, step=step)
    peers = {}
    if max(counts) == 1:
        peers["eager"] = partial(_torch_token, *arguments, weights, cache, step)
    # A prompt's initial state is a block of zeros, which stays in the L2 cache.
    num_states = sum(2 if n == 1 else 1 for n in counts)
    return Work(
        ours=ours,
        peers=peers,
        bytes=num_states * numel_bytes(state[0], ring[0])
        + numel_bytes(qkv, z, z, beta, inputs, weights["conv_weight"]),
        written=(ring, state),
    )


def _torch_token(
    qkv: Tensor,
    z: Tensor,
    beta: Tensor,
    inputs: Tensor,
    weights: dict[str, Any],
    cache: StateCache,
    step: StepStates,
) -> Tensor:
    """Compute rows of one token, all of which write the block that they read."""
    assert cache.state is not None
    blocks, (_, heads, key_dim, value_dim) = step.reads.long(), cache.state.shape
    size, taps = cache.ring.shape[1], weights["conv_weight"]
    positions = (step.seq_lens - 1).long()
    cache.ring[blocks, positions % size] = qkv
    back = torch.arange(taps.shape[1] - 1, -1, -1, device=qkv.device)
    window = cache.ring[blocks[:, None], (positions[:, None] - back) % size]
    mixed = F.silu((window.float() * taps.t().float()).sum(1))
    values = heads * value_dim
    keys = (mixed.shape[1] - values) // 2
    query, key, value = mixed.split([keys, keys, values], 1)
    ratio = heads * key_dim // keys
    query, key = (
        (x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt()).repeat_interleave(ratio, 1)
        for x in (each.unflatten(1, (-1, key_dim)) for each in (query, key))
    )
    kept = (weights["decay"] * F.softplus(inputs.float() + weights["dt_bias"])).exp()
    state = cache.state[blocks] * kept[:, :, None, None]
    known = torch.einsum("bhkv,bhk->bhv", state, key)
    new = beta.float().sigmoid()[:, :, None] * (value.unflatten(1, (heads, -1)) - known)
    state += key[:, :, :, None] * new[:, :, None]
    cache.state[blocks] = state
    found = torch.einsum("bhkv,bhk->bhv", state, query * key_dim**-0.5)
    normed = F.rms_norm(found, (value_dim,), weights["norm_weight"], _EPS)
    return (normed.flatten(1) * F.silu(z.float())).to(z.dtype)


def _conv(
    counts: list[int], channels: int, kernel: int, dtype: torch.dtype, device: torch.device
) -> Work:
    fill = partial(randn, dtype=dtype, device=device)
    projected = fill(sum(counts), 3 * channels)
    ring = fill(len(counts) + 1, kernel, channels, seed=1)
    ring[0] = 0
    weight = fill(channels, kernel, seed=2)
    ours = partial(
        short_conv, projected, weight, None, StateCache(ring, None), _step(counts, device)
    )
    bytes_moved = numel_bytes(projected, weight) * 4 // 3 + len(counts) * numel_bytes(ring[0])
    return Work(ours=ours, bytes=bytes_moved, written=(ring,))


_QWEN = Heads(key_heads=16, heads=32, key=128, value=128, kernel=4)
_TINY = Heads(key_heads=1, heads=2, key=16, value=16, kernel=4, dtype=torch.float32)
_ROWS_AIM, _PROMPT_AIM = Aim(share=0.8), Aim(seconds=0.6e-3)
_STEPS: tuple[tuple[str, list[int], list[int], Aim | None], ...] = (
    ("rows 1", [1], [1], None),
    *((f"rows {n}", [1] * n, [1] * 3, _ROWS_AIM) for n in (16, 64, 256)),
    ("prompts 1 x 8k", [8192], [70], _PROMPT_AIM),
    ("prompts 8 x 1k", [1024] * 8, [5, 66], _PROMPT_AIM),
    ("64 rows beside 2k", [1] * 64 + [2048], [1, 1, 9], None),
)
CASES = [
    *(
        Case(
            "gated_delta_rule",
            f"9b {name}",
            _delta,
            {"counts": counts, "heads": _QWEN},
            {"counts": tiny, "heads": _TINY},
            aim=aim,
        )
        for name, counts, tiny, aim in _STEPS
    ),
    *(
        Case(
            "short_conv",
            f"1.2b {name}",
            _conv,
            {"counts": counts, "channels": 2048, "kernel": 3, "dtype": torch.bfloat16},
            {"counts": tiny, "channels": 40, "dtype": torch.float32},
        )
        for name, counts, tiny, _ in _STEPS
    ),
]
