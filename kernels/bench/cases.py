"""All cases."""

from __future__ import annotations

from kernels.bench import (
    attention,
    block_copy,
    experts,
    gated_activation,
    matmul,
    norms,
    quantized,
    rotary,
    sampling,
    slot_tables,
)
from kernels.bench.case import Case

_MODULES = (
    *(attention, norms, gated_activation, rotary, matmul, quantized),
    *(experts, sampling, slot_tables, block_copy),
)


def all_cases() -> list[Case]:
    """Return every case, those with an aim first: they are measured even if time runs out."""
    cases = [case for module in _MODULES for case in module.CASES]
    return sorted(cases, key=lambda case: case.aim is None)


def tiny_cases() -> list[Case]:
    """Return a case of each operation at its tiny shape."""
    first: dict[str, Case] = {}
    for case in all_cases():
        first.setdefault(case.operation, case.tiny_case())
    return list(first.values())
