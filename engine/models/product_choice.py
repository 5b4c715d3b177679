"""The products that serve a model on a CPU, ours or oneDNN's, by their time on this machine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn

from engine.layers.int8_linear import Int8Linear, multiplies_int8
from engine.layers.linear import Gated, GatedLinear, Linear
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_linear import PanelLinear
from engine.layers.vocabulary import LMHead
from engine.models.causal_lm import CausalLM
from kernels.cpu import linear as panels
from kernels.cpu.activation import Activation

_ROWS = (1, 4, 16, 64, 512)
_MOST_BYTES = 16 * 2**20  # of a weight that is timed; a larger one is timed in part
# Of all projections. Less is so fast that the time between products is the larger part of a step,
# which ours keep short.
_LEAST_BYTES = 64 * 2**20
_REPEATS = 4
# Ours can be fused to whole layers, which saves more than this.
_GAIN = 1.05


class Shape(msgspec.Struct, frozen=True):
    """A projection: y = x W^T, or with an activation of the first half of y, the gates."""

    out_features: int
    in_features: int
    activation: Activation | None


class ProductChoice(msgspec.Struct, frozen=True):
    """Which products serve.

    Attributes:
        ours: whether those of `kernels.cpu.linear` do, oneDNN's otherwise.
        speed: of ours over oneDNN's, by the number of rows, for all projections of the model.
    """

    ours: bool
    speed: dict[int, float]

    def summary(self) -> str:
        """Return one line for the log."""
        figures = ", ".join(f"{speed:.2f} at {rows}" for rows, speed in self.speed.items())
        chosen = "our" if self.ours else "oneDNN's"
        return f"{chosen} products serve; ours over oneDNN's, by tokens in a step: {figures}"


def projection_shapes(model: CausalLM) -> Counter[Shape]:
    """Return how many projections of each shape `model` has, those of experts left out."""
    shapes = Counter(
        _shape(module.weight, module.activation if isinstance(module, GatedLinear) else None)
        for module in model.modules()
        if isinstance(module, Linear) and not isinstance(module, LMHead)
    )
    head = model.lm_head.rows if isinstance(model.lm_head, LMHead) else None
    shapes[_shape(model.model.embed_tokens.rows if head is None else head, None)] += 1
    return shapes


def _shape(weight: Tensor, activation: Activation | None) -> Shape:
    out_features, in_features = weight.shape
    return Shape(out_features, in_features, activation)


def can_choose(shapes: Counter[Shape], dtype: torch.dtype, *, int8: bool) -> bool:
    """Return whether both ours and oneDNN's products are for weights of `shapes`."""
    num_bytes = sum(
        count * shape.out_features * shape.in_features * dtype.itemsize
        for shape, count in shapes.items()
    )
    if num_bytes < _LEAST_BYTES or not (multiplies_int8() if int8 else can_pack(dtype)):
        return False
    return all(
        panels.serves(torch.empty(0, shape.in_features, dtype=dtype), torch.device("cpu"))
        and (shape.activation is None or panels.can_gate(shape.out_features // 2))
        for shape in shapes
    )


def measure_products(shapes: Counter[Shape], dtype: torch.dtype, *, int8: bool) -> ProductChoice:
    """Time ours and oneDNN's products of weights of `shapes`, which `can_choose` must allow.

    It takes a second or two. The faster ones are chosen, for all numbers of rows: a weight is
    packed for one of the two.
    """
    ours_s, others_s = dict.fromkeys(_ROWS, 0.0), dict.fromkeys(_ROWS, 0.0)
    with torch.inference_mode():
        for shape, count in shapes.items():
            part = _part(shape, dtype)
            weight = torch.ones(part.out_features, part.in_features, dtype=dtype)
            share = count * shape.out_features / part.out_features
            ours = PanelLinear(weight, None, int8=int8, activation=part.activation)
            other: nn.Module = Int8Linear(weight, None) if int8 else PackedLinear(weight, None)
            if part.activation is not None:
                other = Gated(other, part.activation)
            for rows in _ROWS:
                x = torch.ones(rows, part.in_features, dtype=dtype)
                ours_s[rows] += share * _least_seconds(ours, x)
                others_s[rows] += share * _least_seconds(other, x)
    speed = {rows: others_s[rows] / ours_s[rows] for rows in _ROWS}
    mean = math.exp(sum(map(math.log, speed.values())) / len(speed))
    return ProductChoice(mean * _GAIN >= 1, speed)


def _part(shape: Shape, dtype: torch.dtype) -> Shape:
    """Return as much of `shape` as is timed, in steps that `can_gate`."""
    most = max(64, _MOST_BYTES // dtype.itemsize // shape.in_features // 64 * 64)
    return Shape(min(shape.out_features, most), shape.in_features, shape.activation)


def _least_seconds(product: Callable[[Tensor], Tensor], x: Tensor) -> float:
    product(x)
    least = math.inf
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        product(x)
        least = min(least, time.perf_counter() - begin)
    return least
