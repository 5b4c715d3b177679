"""The table of resources, and what the benchmark puts down of the kernels it launches."""

import dataclasses

import torch

from kernels.bench.resources import launches
from kernels.rms_norm import rms_norm, rms_norm_add
from tests.aot import resources
from tests.aot.compiler import compiling_for


def test_table_and_launches() -> None:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128, dtype=torch.bfloat16, device="meta")
    kernels = []
    for gpu in ("sm_90", "sm_80"):
        with compiling_for(gpu) as found, launches() as launched:
            rms_norm(x, weight, 1e-5)
            rms_norm_add(x, x, weight, 1e-5)
        assert set(launched) == {"rms_norm._kernel"}
        kernels += found
    lines = resources.markdown(kernels[:3]).splitlines()
    assert lines[4] == "| kernel | configuration | warps, stages | sm_80 | sm_90 |"
    add, alone = lines[6:]
    shared = f"{kernels[0].shared / 1024:.1f}".removesuffix(".0")
    one = f"{kernels[0].registers} / {shared}"
    other = f"{kernels[2].registers} / {shared}"
    assert alone == f"| rms_norm._kernel | BLOCK 128, bf16 | 1, 3 | {other} | {one} |"
    both = f"{kernels[1].registers} / {shared}"
    assert add == f"| rms_norm._kernel | ADD, BLOCK 128, bf16 | 1, 3 |  | {both} |"


def test_matrix_units_and_stack_are_told() -> None:
    x = torch.empty(64, 128, dtype=torch.bfloat16, device="meta")
    with compiling_for("sm_90") as found:
        rms_norm(x, x[0], 1e-5)
    kernel = dataclasses.replace(found[0], matrix="wgmma", stack=8, registers=40, shared=1536)
    assert "| 40 / 1.5, stack 8 wgmma |" in resources.markdown([found[0], kernel])
