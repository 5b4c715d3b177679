"""Norms, activations and RoPE in C++ against the references in float32, bfloat16 included."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import gated_activation, rms_norm, rotary
from kernels.cpu.activation import ACTIVATIONS, Activation, plain_activation

# A result in half precision is rounded twice, by eps / 2 each: what is normed, and its product with
# the weight. Sums of up to 900 positive terms, roots and exponentials take less than 16 roundings
# of float32.
TOLERANCES = {
    torch.float32: 16 * torch.finfo(torch.float32).eps,
    **{
        dtype: torch.finfo(dtype).eps + 16 * torch.finfo(torch.float32).eps
        for dtype in (torch.float16, torch.bfloat16)
    },
}
each_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)


def _randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _apart(tensor: Tensor) -> Tensor:
    """Return equal values in rows that lie apart, with NaN between them."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.nan, dtype=tensor.dtype)
    wide[..., : tensor.shape[-1]] = tensor
    return wide[..., : tensor.shape[-1]]


def _assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[actual.dtype]
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@each_dtype
@pytest.mark.parametrize("unit_offset", [False, True])
# A tail; whole vectors; so many rows that all threads have some.
@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 5, 896), (300, 257)], ids=str)
def test_norms(fast: Any, shape: tuple[int, ...], unit_offset: bool, dtype: torch.dtype) -> None:
    x, residual = (_apart(_randn(*shape, dtype=dtype, seed=i)) for i in range(2))
    weight = _randn(shape[-1], dtype=dtype, seed=2)
    normed = fast.rms_norm(x, weight, 1e-5, unit_offset)
    _assert_close(normed, rms_norm.reference(x, weight, 1e-5, unit_offset=unit_offset))
    normed, total = fast.rms_norm_add(x, residual, weight, 1e-5, unit_offset)
    assert torch.equal(total, x + residual)
    _assert_close(normed, rms_norm.reference(total, weight, 1e-5, unit_offset=unit_offset))


@each_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 2), (7, 62), (2, 3, 200), (40, 9728)], ids=str)
def test_activations(
    fast: Any, shape: tuple[int, ...], activation: Any, dtype: torch.dtype
) -> None:
    gate_up = _apart(_randn(*shape, dtype=dtype))
    out = fast.gated_activation(gate_up, ["silu", "gelu", "gelu_tanh"].index(activation))
    assert out.shape == (*shape[:-1], shape[-1] // 2)
    _assert_close(out, gated_activation.reference(gate_up, activation))


@pytest.mark.usefixtures("fast")
@each_dtype
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_plain_activation_depends_on_its_value_alone(
    activation: Activation, dtype: torch.dtype
) -> None:
    """Not on its place in a row, nor on the thread that computes it."""
    x = _randn(40_003, dtype=dtype) * 3
    out = plain_activation(x, activation)
    gates = torch.stack((x, torch.ones_like(x)), dim=-1)
    _assert_close(out, gated_activation.reference(gates, activation).squeeze(-1))
    for begin, end in ((0, 1), (7, 40), (16, 33), (39_990, 40_003)):
        assert torch.equal(plain_activation(x[begin:end], activation), out[begin:end])
    assert torch.equal(
        plain_activation(x[:40_000].view(100, 400).T, activation).T.flatten(), out[:40_000]
    )


@each_dtype
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [False, True])
# Tokens, heads, KV heads, head and rotary dimensions.
@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 2, 2), (5, 6, 2, 10, 6), (70, 14, 2, 64, 64), (3, 8, 1, 80, 32)], ids=str
)
def test_rotary(
    fast: Any, shape: tuple[int, int, int, int, int], norms: bool, interleaved: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    tokens, heads, kv_heads, dim, rotary_dim = shape
    qkv = _apart(_randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype))
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in qkv.split(sizes, -1))
    angles = _randn(tokens, rotary_dim // 2, dtype=torch.float32, seed=1)
    cos, sin = angles.cos(), angles.sin()
    weights = [_randn(dim, dtype=dtype, seed=seed) if norms else None for seed in (2, 3)]
    caches = [torch.full((9, 8, kv_heads, dim), 7.0, dtype=dtype) for _ in range(2)]
    slots = torch.randperm(72, generator=torch.Generator().manual_seed(4))[:tokens]
    slots[::3] = -1
    scale = torch.linspace(1.0, 1.7, tokens) if norms else None
    rotated = fast.rotary_and_cache(
        query, key, value, cos, sin, *caches, slots, *weights, 1e-5, interleaved, scale
    )

    def expected(x: Tensor, norm: Tensor | None, scale: Tensor | None = None) -> Tensor:
        return rotary.reference(
            x, cos, sin, norm=norm, norm_eps=1e-5, interleaved=interleaved, scale=scale
        )

    # Half precision rounds after the norm too.
    slack = 4 if norms and dtype != torch.float32 else 1
    _assert_close(rotated / slack, expected(query, weights[0], scale) / slack)
    real = slots >= 0
    written = caches[0].flatten(0, 1)
    _assert_close(written[slots[real]] / slack, expected(key, weights[1])[real] / slack)
    assert torch.equal(caches[1].flatten(0, 1)[slots[real]], value[real])
    for cache in caches:
        cache.flatten(0, 1)[slots[real]] = 7.0
        assert (cache == 7.0).all(), "something else was written"
