"""The table of compiled kernels' resources: `pytest tests/aot --resources FILE.md`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

import torch
import triton

from tests.aot.compiler import GPUS, Compiled

# Constants for GPU capabilities: a kernel may differ by GPU within one row.
_OF_THE_GPU = {"NATIVE", "CONVERTS", "NUM_BLOCKS", "PARTS"}

collected: list[Compiled] = []  # all kernels checked by tests


class _Form(NamedTuple):
    """Key of a table row: a kernel and its launch configuration."""

    kernel: str
    configuration: str
    num_warps: int


def markdown(kernels: Iterable[Compiled]) -> str:
    """Return the table: a row per kernel and configuration, a column per GPU."""
    rows: dict[_Form, dict[str, Compiled]] = {}
    for kernel in kernels:
        row = rows.setdefault(_form(kernel), {})
        # Specialised twice, for example by divisibility: show the larger one.
        row[kernel.gpu] = max(row.get(kernel.gpu, kernel), kernel, key=lambda k: k.registers)
    gpus = [gpu for gpu in GPUS if any(gpu in row for row in rows.values())]
    lines = [
        f"Compiled on {date.today().isoformat()} by Triton {triton.__version__} with torch "
        f"{torch.__version__}.",
        "A cell: registers per thread / KiB of shared memory per thread block; for kernels with",
        "matrix products also their instruction and number of pipeline stages. A stack size is",
        "given if registers spilled.",
        "",
        f"| kernel | configuration | warps | {' | '.join(gpus)} |",
        f"|---|---|---|{'---|' * len(gpus)}",
    ]
    for form, row in sorted(rows.items(), key=lambda item: _order(item[0])):
        cells = " | ".join(_cell(row[gpu]) if gpu in row else "" for gpu in gpus)
        lines.append(f"| {form.kernel} | {form.configuration} | {form.num_warps} | {cells} |")
    return "\n".join(lines) + "\n"


def _form(kernel: Compiled) -> _Form:
    module = kernel.module.removeprefix("kernels.")
    return _Form(f"{module}.{kernel.kernel}", _configuration(kernel), kernel.num_warps)


def _order(form: _Form) -> list[tuple[str, int]]:
    """Return a key that sorts numbers in text by value."""
    words = re.findall(r"(\D*)(\d*)", f"{form.kernel} {form.configuration}")
    return [(text, int(number or 0)) for text, number in words]


def _configuration(kernel: Compiled) -> str:
    """Return the specialisation constants and the dtypes of operands."""
    named = {
        name: value
        for name, value in kernel.constants.items()
        if name.isupper() and name not in _OF_THE_GPU
    }
    dtypes = [dtype for dtype in kernel.dtypes if not dtype.startswith("i")]
    words = [
        name if value is True else f"{name} {value}"
        for name, value in named.items()
        if value is not False and value is not None
    ]
    return ", ".join([*words, " ".join(dtypes)] if dtypes else words)


def _cell(kernel: Compiled) -> str:
    shared = f"{kernel.shared / 1024:.1f}".removesuffix(".0")
    stack = f", stack {kernel.stack}" if kernel.stack else ""
    products = f", {kernel.matrix} x {kernel.num_stages}" if kernel.matrix else ""
    return f"{kernel.registers} / {shared}{products}{stack}"
