"""The table of resources."""

import dataclasses

import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_add
from tests.aot import resources
from tests.aot.compiler import Compiled, compiling_for


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    """Return two specialisations of a kernel."""
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    with compiling_for("sm_90") as found:
        rms_norm(x, x[0], 1e-5)
        rms_norm_add(x, x, x[0], 1e-5)
    return found


def test_a_kernel_tells_its_configuration(compiled: list[Compiled]) -> None:
    alone, add = compiled
    assert (alone.module, alone.kernel, alone.gpu) == ("kernels.rms_norm", "_kernel", "sm_90")
    assert alone.constants["ADD"] is False
    assert add.constants["ADD"] is True
    assert add.constants["BLOCK"] == 4096
    assert alone.dtypes == ("bf16",)
    assert alone.matrix == ""


def test_rows_are_configurations_and_columns_gpus(compiled: list[Compiled]) -> None:
    def row(gpu: str, registers: int, block: int, **others: object) -> Compiled:
        constants = {"BLOCK": block, "ADD": block == 64, "FLAG": False, "hint": 3, "NONE": None}
        constants["NATIVE"] = gpu == "sm_90"
        changes = {"gpu": gpu, "registers": registers, "constants": constants, "shared": 1536}
        changes |= {"num_warps": 4, "num_stages": 2, "dtypes": ("bf16", "i32", "u8")}
        return dataclasses.replace(compiled[0], **(changes | others))  # type: ignore[arg-type]

    text = resources.markdown(
        [
            row("sm_90", 40, 128),
            row("sm_80", 50, 128, stack=8),
            row("sm_90", 44, 128),  # of another divisibility, which is not shown
            row("sm_90", 90, 64, matrix="wgmma"),
        ]
    )
    _, table = text.split("\n\n")
    assert table.splitlines() == [
        "| kernel | configuration | warps | sm_80 | sm_90 |",
        "|---|---|---|---|---|",
        "| rms_norm._kernel | BLOCK 64, ADD, bf16 u8 | 4 |  | 90 / 1.5, wgmma x 2 |",
        "| rms_norm._kernel | BLOCK 128, bf16 u8 | 4 | 50 / 1.5, stack 8 | 44 / 1.5 |",
    ]
