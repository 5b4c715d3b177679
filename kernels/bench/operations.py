"""The measured operations, the tests that each must pass, and their cases."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

from kernels.bench.case import Case


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel that is measured if its tests pass.

    Attributes:
        name: its file in kernels/ and in kernels/bench/; its tests are test_<name>*.py or those
            in the folder <name>.
        requires: operations that it launches, whose tests must pass too.
        shards: processes that share its tests; most of their time is compilation.
    """

    name: str
    requires: tuple[str, ...] = ()
    shards: int = 1

    def cases(self) -> list[Case]:
        """Return the cases, the most important first."""
        cases: list[Case] = importlib.import_module(f"kernels.bench.{self.name}").CASES
        return cases


OPERATIONS = (
    Operation("paged_decode", requires=("split_plan",), shards=4),
    Operation("paged_prefill", shards=4),
    Operation("rms_norm", shards=2),
    Operation("layer_norm", shards=2),
    Operation("gated_activation", shards=2),
    Operation("rotary", shards=4),
    Operation("matmul", shards=2),
    Operation("quantized", shards=2),
    Operation("experts", shards=2),
    Operation("sampling", shards=4),
    Operation("step_inputs", requires=("slot_tables",)),
    Operation("token_scatter", requires=("slot_tables",)),
    Operation("block_copy"),
)


def all_cases() -> list[Case]:
    """Return every case, those with an aim first: they are measured even if time runs out."""
    cases = [case for operation in OPERATIONS for case in operation.cases()]
    return sorted(cases, key=lambda case: case.aim is None)


def tiny_cases() -> list[Case]:
    """Return the first case of every operation, at its tiny shape."""
    return [operation.cases()[0].tiny_case() for operation in OPERATIONS]


def owner(file: Path, names: list[str]) -> str:
    """Return the operation that a test file belongs to, or the name in the file name if none.

    Args:
        file: relative to the folder of the tests; the files of a folder in it belong together.
    """
    stem = file.parts[0].removesuffix(".py").removeprefix("test_")
    fitting = [name for name in names if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len, default=stem)
