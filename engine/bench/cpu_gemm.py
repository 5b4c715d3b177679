"""`python -m engine.bench.cpu_gemm`: GEMMs on this CPU, ours beside oneDNN's.

For models of some sizes, the GFLOP/s of the four projections of a layer by the number of tokens. Up
to 64 tokens, weights come from memory, as in a step: GEMMs go from layer to layer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from engine.bench.ceilings import timed
from engine.bench.kernels.shapes import SHAPES, TINY, Shape
from engine.bench.tables import markdown, sizes
from engine.layers.linear.cpu_packed import CpuPackedLinear
from engine.layers.linear.int8 import Int8Linear
from engine.layers.linear.linear import Gated
from engine.layers.linear.onednn import OneDnnLinear, can_pack
from kernels.cpu.linear import serves

_WEIGHT_BYTES = 2**29  # of all layers: more than what a processor's caches hold of it
_TURNS = 3
_LEAST_S = 0.2  # of a turn
_MOST_COLD_ROWS = 64  # above, multiplying takes longer than reading

Rates = dict[str, dict[int, float]]  # operations per second, by backend and rows


def _plain(weight: Tensor) -> nn.Module:
    """Return torch's GEMM with a weight as it is."""
    found = nn.Linear(1, 1, bias=False)
    found.weight = nn.Parameter(weight)
    return found


def _ours(weight: Tensor, gated: bool, *, int8: bool) -> nn.Module:
    return CpuPackedLinear(weight, None, int8=int8, activation="silu" if gated else None)


def _others(weight: Tensor, gated: bool, *, make: Callable[[Tensor], nn.Module]) -> nn.Module:
    return Gated(make(weight), "silu") if gated else make(weight)


BACKENDS: dict[str, Callable[[Tensor, bool], nn.Module]] = {
    "ours bf16": partial(_ours, int8=False),
    "F.linear bf16": partial(_others, make=_plain),
    "oneDNN bf16, packed": partial(_others, make=lambda weight: OneDnnLinear(weight, None)),
    "ours int8": partial(_ours, int8=True),
    "oneDNN int8": partial(_others, make=lambda weight: Int8Linear(weight, None)),
}


def measure(shape: Shape, rows: Sequence[int]) -> Rates:
    """Return the best rates of a layer's GEMMs; the backends take turns, as machines drift."""
    flops = 2 * shape.layer_parameters // shape.layers  # per token
    num_layers = max(1, _WEIGHT_BYTES // flops)
    modules = {
        name: [
            (make((0.02 * torch.randn(outputs, inputs)).bfloat16(), "gate" in part), inputs)
            for _ in range(num_layers)
            for part, (outputs, inputs) in shape.projections.items()
        ]
        for name, make in BACKENDS.items()
    }
    rates: Rates = {name: dict.fromkeys(rows, 0.0) for name in BACKENDS}
    for count in rows:
        some = num_layers if count <= _MOST_COLD_ROWS else 1
        given = {
            each: torch.randn(count, each).bfloat16() for _, each in shape.projections.values()
        }
        for name in [*BACKENDS] * _TURNS:
            layers = modules[name][: some * len(shape.projections)]
            seconds = min(timed(partial(_run, layers, given), _LEAST_S).times) / some
            rates[name][count] = max(rates[name][count], count * flops / seconds)
    return rates


def _run(layers: list[tuple[nn.Module, int]], given: dict[int, Tensor]) -> None:
    for layer, inputs in layers:
        layer(given[inputs])


def table(shape: Shape, rates: Rates) -> str:
    """Return GFLOP/s, and ours over the best other in bf16, and in int8 over bf16."""
    rows = []
    for count in rates["ours bf16"]:
        speed = {name: found[count] / 1e9 for name, found in rates.items()}
        best = max(speed["F.linear bf16"], speed["oneDNN bf16, packed"])
        ratios = (speed["ours bf16"] / best, speed["ours int8"] / speed["ours bf16"])
        cells = (f"{value:,.0f}" for value in speed.values())
        rows.append((f"{count:,}", *cells, *(f"{ratio:.2f}" for ratio in ratios)))
    return markdown((f"{shape.name}, tokens", *rates, "bf16 over best", "int8 over bf16"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.cpu_gemm", description=__doc__)
    by_label = {shape.label: shape for shape in (*SHAPES, TINY)}
    parser.add_argument("--models", nargs="+", choices=by_label, default=["0.5b", "1.5b", "8b"])
    parser.add_argument("--rows", type=sizes, default="1,4,16,64,256,1024,8192", help="tokens")
    options = parser.parse_args(arguments)
    weight = torch.empty(0, 64, dtype=torch.bfloat16)
    if not (serves(weight, weight.device) and can_pack(torch.bfloat16)):
        parser.error("needs the bfloat16 GEMM of both backends: trident's kernels and oneDNN")
    with torch.inference_mode():
        for label in options.models:
            print(f"\nGFLOP/s\n\n{table(by_label[label], measure(by_label[label], options.rows))}")


if __name__ == "__main__":
    main()
