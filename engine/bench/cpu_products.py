"""`python -m engine.bench.cpu_products`: matrix products on this CPU, ours beside oneDNN's.

For models of some sizes, the time of the four projections of a layer by the number of tokens. Up to
64 tokens, weights come from memory, as in a step: products go from layer to layer.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.bench.shapes import SHAPES, TINY, Shape
from engine.bench.stopwatch import repeated_seconds
from engine.layers.int8_linear import Int8Linear
from engine.layers.linear import Gated
from engine.layers.packed_linear import PackedLinear, can_pack
from engine.layers.panel_linear import PanelLinear
from kernels.cpu.linear import serves

_ROWS = (1, 4, 16, 64, 256, 1024, 8192)
_WEIGHT_BYTES = 2**29  # of all layers: more than what a processor's caches hold of it
_MOST_COLD_ROWS = 64  # above, multiplying takes longer than reading
_REPEATS = 3

Times = dict[str, dict[int, float]]  # seconds of a layer, by form and rows


class _Plain(nn.Module):
    """The product that torch makes of a weight as it is."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self._weight)


def _ours(weight: Tensor, *, gated: bool, int8: bool) -> nn.Module:
    return PanelLinear(weight, None, int8=int8, activation="silu" if gated else None)


def _others(make: Callable[[Tensor], nn.Module]) -> Callable[..., nn.Module]:
    def form(weight: Tensor, *, gated: bool) -> nn.Module:
        return Gated(make(weight), "silu") if gated else make(weight)

    return form


FORMS: dict[str, Callable[..., nn.Module]] = {
    "ours bf16": lambda weight, gated: _ours(weight, gated=gated, int8=False),
    "F.linear bf16": _others(_Plain),
    "oneDNN bf16, packed": _others(lambda weight: PackedLinear(weight, None)),
    "ours int8": lambda weight, gated: _ours(weight, gated=gated, int8=True),
    "oneDNN int8": _others(lambda weight: Int8Linear(weight, None)),
}


def _projections(shape: Shape) -> list[tuple[int, int, bool]]:
    """Return outputs, inputs and whether half of the outputs are gates, of each in a layer."""
    query = shape.heads * shape.head_dim
    return [
        (query + 2 * shape.kv_heads * shape.head_dim, shape.hidden, False),
        (shape.hidden, query, False),
        (2 * shape.inner, shape.hidden, True),
        (shape.hidden, shape.inner, False),
    ]


def flops(shape: Shape) -> int:
    """Return the operations of a layer's products per token."""
    return sum(2 * outputs * inputs for outputs, inputs, _ in _projections(shape))


def measure(shape: Shape, rows: Sequence[int]) -> Times:
    """Return the least times of a layer's products."""
    num_layers = max(1, _WEIGHT_BYTES // flops(shape))
    times: Times = {}
    for name, make in FORMS.items():
        layers = [
            [
                (make((0.02 * torch.randn(outputs, inputs)).bfloat16(), gated=gated), inputs)
                for outputs, inputs, gated in _projections(shape)
            ]
            for _ in range(num_layers)
        ]
        times[name] = {}
        for count in rows:
            some = layers if count <= _MOST_COLD_ROWS else layers[:1]
            given = {
                inputs: torch.randn(count, inputs).bfloat16()
                for _, inputs, _ in _projections(shape)
            }
            products = [product for layer in some for product in layer]

            def run() -> None:
                for product, inputs in products:  # noqa: B023 used within the iteration
                    product(given[inputs])  # noqa: B023

            times[name][count] = min(repeated_seconds(run, _REPEATS)) / len(some)
    return times


def table(shape: Shape, times: Times) -> list[str]:
    """Return lines with GFLOP/s, and ours over the best other in bf16 and in int8."""
    head = "".join(f"{name:>21}" for name in times)
    lines = [f"{shape.label}, {'GFLOP/s':<9}{head}{'bf16 over best':>16}{'int8 over bf16':>16}"]
    for rows in next(iter(times.values())):
        speed = {name: rows * flops(shape) / taken[rows] / 1e9 for name, taken in times.items()}
        best = max(value for name, value in speed.items() if "bf16" in name and "ours" not in name)
        cells = "".join(f"{value:21,.0f}" for value in speed.values())
        bf16, int8 = speed["ours bf16"], speed["ours int8"]
        lines.append(f"{rows:>15,}{cells}{bf16 / best:16.2f}{int8 / bf16:16.2f}")
    return lines


def draw(path: Path, measured: Sequence[tuple[Shape, Times]]) -> None:
    """Plot the rates by rows to a PNG file, a panel per model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(measured), 5), layout="constrained")
    axes = figure.subplots(1, len(measured), sharey=True, squeeze=False)[0]
    for axis, (shape, times) in zip(axes, measured, strict=True):
        for name, taken in times.items():
            rates = [rows * flops(shape) / seconds / 1e9 for rows, seconds in taken.items()]
            axis.plot(list(taken), rates, "o-" if "ours" in name else "s--", label=name)
        axis.set_title(f"projections of {shape.name}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens")
        axis.set_ylabel("GFLOP/s")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(path)


def _numbers(text: str) -> list[int]:
    return sorted(int(number) for number in text.split(","))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and draw if asked to."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.cpu_products", description=__doc__
    )
    by_label = {shape.label: shape for shape in (*SHAPES, TINY)}
    parser.add_argument("--models", nargs="+", choices=by_label, default=["0.5b", "1.5b", "8b"])
    parser.add_argument("--rows", type=_numbers, default=_ROWS, help="tokens, as in 1,16,512")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot to a PNG file")
    options = parser.parse_args(arguments)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot: needs matplotlib; pip install 'trident-llm[bench]'")
    weight = torch.empty(0, 64, dtype=torch.bfloat16)
    if not (serves(weight, weight.device) and can_pack(torch.bfloat16)):
        parser.error("this CPU has not both products of ours and of oneDNN in bfloat16")
    measured = []
    with torch.inference_mode():
        for label in options.models:
            shape = by_label[label]
            measured.append((shape, measure(shape, options.rows)))
            print("\n".join(["", *table(*measured[-1])]), flush=True)
    if options.plot:
        draw(options.plot, measured)


if __name__ == "__main__":
    main()
