"""All cases, and the tests that must pass before those of an operation are measured."""

from __future__ import annotations

from pathlib import PurePath

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

# Operation -> what it launches besides, whose tests must pass too.
_REQUIRED = {
    "paged_decode": ("split_plan",),
    "step_inputs": ("slot_tables",),
    "token_scatter": ("slot_tables",),
}
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


def is_tested_by(operation: str, file: str) -> bool:
    """Return whether a file of tests/kernels tests `operation`, or what it launches.

    Its tests are test_<operation>.py, test_<operation>_*.py or those in the folder <operation>.
    """
    stem = PurePath(file).parts[0].removesuffix(".py").removeprefix("test_")
    return any(
        stem == name or stem.startswith(f"{name}_")
        for name in (operation, *_REQUIRED.get(operation, ()))
    )
