"""The tables of ranks on a CPU."""

from __future__ import annotations

import pytest
import torch

from engine.bench.ranks import steps, wire
from tests.factories.forms import in_panels


def test_wire_table_has_the_bytes_and_times_of_a_step() -> None:
    cells = [cell.strip() for cell in wire().splitlines()[-1].split("|")[1:-1]]
    assert cells[0] == "256"
    assert 3000 < int(cells[1]) < 5000
    assert all(float(cell) > 0 for cell in cells[2:])


@pytest.mark.skipif(not in_panels(torch.bfloat16), reason="the CPU kernels are not built")
def test_steps_table_has_a_row_for_each_batch_and_the_prompt() -> None:
    lines = steps("tiny", (1, 2), 16, 2).splitlines()
    names = [line.split("|")[1].strip() for line in lines[2:]]
    assert names == ["decode, 1 rows", "decode, 2 rows", "prompt of 16"]
