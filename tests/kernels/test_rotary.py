from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.rotary import rotary_and_cache

T, H, HKV, D, BLOCKS, SIZE = 5, 6, 2, 10, 4, 3


def _arguments(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    angles = torch.rand(T, D // 2, generator=generator) * 6
    return {
        "query": torch.randn(T, H, D, generator=generator).to(dtype),
        "key": torch.randn(T, HKV, D, generator=generator).to(dtype),
        "value": torch.randn(T, HKV, D, generator=generator).to(dtype),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "key_cache": torch.full((BLOCKS, SIZE, HKV, D), 7.0, dtype=dtype),
        "value_cache": torch.full((BLOCKS, SIZE, HKV, D), 7.0, dtype=dtype),
        "slot_mapping": torch.tensor([11, 0, 4, 3, 7]),
    }


def _oracle(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotation as multiplication of complex numbers."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.complex(
        cos.double(), sin.double()
    ).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), dim=-1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)],
    ids=str,
)
def test_rotates_and_writes_only_the_slots(dtype: torch.dtype, tolerance: float) -> None:
    arguments = _arguments(dtype)
    originals = {name: tensor.clone() for name, tensor in arguments.items()}
    rotated = rotary_and_cache(**arguments)
    cos, sin, slots = (originals[name] for name in ("cos", "sin", "slot_mapping"))
    expected = _oracle(originals["query"], cos, sin)
    torch.testing.assert_close(rotated.double(), expected, rtol=tolerance, atol=tolerance)
    keys, values = arguments["key_cache"].flatten(0, 1), arguments["value_cache"].flatten(0, 1)
    expected = _oracle(originals["key"], cos, sin)
    torch.testing.assert_close(keys[slots].double(), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(values[slots], originals["value"])
    others = [slot for slot in range(BLOCKS * SIZE) if slot not in slots.tolist()]
    assert (keys[others] == 7).all()
    assert (values[others] == 7).all()
    for name in ("query", "key", "value", "cos", "sin", "slot_mapping"):
        assert torch.equal(arguments[name], originals[name]), name


def test_takes_views_of_one_fused_projection() -> None:
    arguments = _arguments()
    parts = [arguments[name].flatten(1) for name in ("query", "key", "value")]
    fused = torch.cat(parts, dim=-1).split([part.shape[1] for part in parts], dim=-1)
    expected = rotary_and_cache(**_arguments())
    views = {
        name: view.unflatten(-1, (-1, D))
        for name, view in zip(("query", "key", "value"), fused, strict=True)
    }
    assert torch.equal(rotary_and_cache(**{**arguments, **views}), expected)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", torch.ones(T, H, D, dtype=torch.int64), "query: must be"),
        ("query", torch.ones(T, D), r"query: must have shape \[any, any, any\]"),
        ("query", torch.ones(T, H, 9), "query: the last dimension must be even"),
        ("key", torch.ones(T - 1, HKV, D), r"key: must have shape \[5, any, 10\]"),
        ("key", torch.ones(T, HKV, D).half(), "key: must be torch.float32"),
        ("value", torch.ones(T, HKV + 1, D), r"value: must have shape \[5, 2, 10\]"),
        ("cos", torch.ones(T, D), r"cos: must have shape \[5, 5\]"),
        ("sin", torch.ones(T, D // 2).half(), "sin: must be torch.float32"),
        ("key_cache", torch.ones(BLOCKS, SIZE, HKV, 4), "key_cache: must have shape"),
        ("key_cache", torch.ones(BLOCKS, SIZE, HKV, D).bfloat16(), "key_cache: must be"),
        ("value_cache", torch.ones(2, SIZE, HKV, D), "value_cache: must have shape"),
        ("slot_mapping", torch.zeros(T, dtype=torch.int32), "slot_mapping: must be torch.int64"),
        ("slot_mapping", torch.zeros(T + 1, dtype=torch.int64), "slot_mapping: must have shape"),
        ("slot_mapping", torch.zeros(T, dtype=torch.int64, device="meta"), "slot_mapping: .*cpu"),
    ],
)
def test_wrong_arguments_are_named(name: str, wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rotary_and_cache(**{**_arguments(), name: wrong})


def test_a_cache_that_would_be_copied_is_refused() -> None:
    strided = torch.ones(SIZE, BLOCKS, HKV, D).transpose(0, 1)
    with pytest.raises(ValueError, match="value_cache: must be contiguous"):
        rotary_and_cache(**{**_arguments(), "value_cache": strided})
