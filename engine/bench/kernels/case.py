"""Benchmark cases: the shapes of a real model, our kernel and torch's implementation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engine.bench.kernels.shapes import LLAMA_8B, QWEN_0_5B, Shape

Call = partial[Any]
MODELS = (LLAMA_8B, QWEN_0_5B)
SMALL = Shape("small", "for the interpreter", 2, 100, 100, 6, 2, 16, 300)

# Tolerated relative RMS difference between two summation orders, by the coarser dtype of the two.
_TOLERANCES = {
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 2e-2,
    torch.float8_e4m3fn: 4e-2,
}


@dataclass(frozen=True, slots=True)
class Aim:
    """A target: least share of the floor, or most seconds."""

    share: float | None = None
    seconds: float | None = None

    def met(self, seconds: float, share: float | None) -> bool:
        """Return whether a time, and its share of the floor, meet it."""
        if self.seconds is not None:
            return seconds <= self.seconds
        return share is not None and self.share is not None and share >= self.share

    def __str__(self) -> str:
        return f"<= {1e3 * self.seconds:g} ms" if self.seconds else f">= {self.share:.0%}"


ELEMENTWISE = Aim(share=0.85)  # of the copy bandwidth, at 8192 tokens


def differs(ours: Any, theirs: Any) -> str | None:
    """Return how two results differ beyond rounding, None if they do not."""
    mine, yours = list(_tensors(ours)), list(_tensors(theirs))
    shapes = [[list(tensor.shape) for tensor in found] for found in (mine, yours)]
    if shapes[0] != shapes[1]:
        return f"shapes {shapes[0]} and {shapes[1]}"
    for index, (a, b) in enumerate(zip(mine, yours, strict=True)):
        if not a.is_floating_point():
            if wrong := int((a != b).sum()):
                return f"{wrong} of {a.numel()} values of output {index}"
            continue
        tolerance = max(_TOLERANCES[a.dtype], _TOLERANCES[b.dtype])
        scale = b.float().square().mean().sqrt().clamp(min=1e-12)
        error = float((a.float() - b.float()).square().mean().sqrt() / scale)
        if not error <= tolerance:  # NaN fails too
            return f"relative RMS {error:.1e} of output {index}"
    return None


@dataclass(slots=True)
class Work:
    """The calls of one case on allocated tensors.

    Attributes:
        ours: the wrapper of our kernel.
        peers: torch implementations of the same operation, by name.
        compiled: one that is measured through torch.compile.
        bytes: minimum number of bytes to read and write.
        flops: replaces the bytes if arithmetic bounds the operation.
        written: tensors that every call changes; they are compared like its result.
        differs: compares two results.
        graph: whether all calls, torch's included, can be captured in a CUDA graph.
    """

    ours: Call
    peers: dict[str, Call] = field(default_factory=dict)
    compiled: Call | None = None
    bytes: int = 0
    flops: int = 0
    written: tuple[Tensor, ...] = ()
    differs: Callable[[Any, Any], str | None] = differs
    graph: bool = True
    _before: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._before = [tensor.clone() for tensor in self.written]

    def outcome(self, call: Call) -> tuple[Tensor, ...]:
        """Return copies of the result of `call` and of `written`, which is restored first."""
        for tensor, before in zip(self.written, self._before, strict=True):
            tensor.copy_(before)
        result = call()
        return tuple(tensor.clone() for tensor in (*_tensors(result), *self.written))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the report.

    Attributes:
        operation: what its cases, and the files of its tests, are named after.
        name: distinguishes it from the other cases of the operation.
        build: allocates tensors and creates the calls from `shape`, on a device.
        shape: arguments of `build`.
        tiny: arguments that are smaller in the interpreter.
        aim: its target.
        compile: measure torch.compile too, which takes seconds.
    """

    operation: str
    name: str
    build: Callable[..., Work]
    shape: dict[str, Any]
    tiny: dict[str, Any]
    aim: Aim | None = None
    compile: bool = False

    @property
    def key(self) -> str:
        """Distinguishes it from all other cases."""
        return f"{self.operation} {self.name}"

    def tiny_case(self) -> Case:
        """Return the same case at its tiny shape, without an aim and torch.compile."""
        return replace(self, shape={**self.shape, **self.tiny}, aim=None, compile=False)


def by_tokens(
    operation: str,
    name: str,
    build: Callable[..., Work],
    *,
    models: Sequence[Shape] = MODELS,
    tokens: Sequence[int] = (8192, 64, 1),
    aim: Aim | None = ELEMENTWISE,
    tiny: Mapping[str, Any] = {},
) -> list[Case]:
    """Return cases of these models with so many tokens; the largest of Llama's has the aim."""
    return [
        Case(
            operation,
            f"{name} {model.label} {count}",
            build,
            {"tokens": count, "model": model, "dtype": torch.bfloat16},
            {"tokens": 19, "model": SMALL, "dtype": torch.float32, **tiny},
            aim=aim if model is LLAMA_8B and count == 8192 else None,
            compile=model is LLAMA_8B and count == 8192,
        )
        for model in models
        for count in tokens
    ]


def numel_bytes(*tensors: Tensor) -> int:
    """Return the bytes moved by reading or writing each of `tensors` once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def randn(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Return normal random numbers: zeros would make matrix units faster than real data does."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=dtype, device=device, generator=generator)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for part in result:
            yield from _tensors(part)
