"""All cases."""

from __future__ import annotations

from engine.bench.kernels import attention, experts, layers, quantized, sampling, state, tables
from engine.bench.kernels.case import Case

_MODULES = (attention, layers, quantized, experts, state, sampling, tables)


def all_cases() -> list[Case]:
    """Return every case, those with an aim first: they are measured even if time runs out."""
    cases = [case for module in _MODULES for case in module.CASES]
    return sorted(cases, key=lambda case: case.aim is None)


def tiny_cases() -> list[Case]:
    """Return a case of each operation at its tiny shape."""
    first = {case.operation: case for case in reversed(all_cases())}
    return [case.tiny_case() for case in first.values()]
