"""A step's inputs and the place of its tokens in C++ against their forms in torch."""

import random
from dataclasses import fields

import pytest
import torch

from kernels.step import step_inputs, token_scatter
from kernels.step.step_inputs import StepInputs, prepare_inputs
from kernels.step.token_scatter import scatter_tokens
from tests.kernels.slot_cases import assert_tables_equal, random_tables

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # Also where Triton's interpreter, or a GPU, would serve.
    for module in (step_inputs, token_scatter):
        monkeypatch.setattr(module.device, "runs_triton", lambda tensor: False)


def _assert_inputs_equal(found: StepInputs, expected: StepInputs) -> None:
    for field in fields(StepInputs):
        left, right = getattr(found, field.name), getattr(expected, field.name)
        assert left.dtype == right.dtype, field.name
        assert torch.equal(left, right), field.name


@pytest.mark.parametrize("seed", range(200))
def test_inputs_and_places(seed: int) -> None:
    rng = random.Random(seed)
    tables = random_tables(9, seed=seed, device=CPU, num_groups=1 + seed % 3)
    slots = rng.sample([*range(9), -1, -1], rng.randint(0, 11))
    counts = [rng.choice([0, 1, 1, 1, 2, 17, 60]) for _ in slots]
    starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
    slot_row = torch.tensor(slots, dtype=torch.int32)
    args = (torch.tensor(starts, dtype=torch.int32), starts[-1] + rng.randint(0, 5), 16)
    expected, computed = step_inputs.reference(tables, slot_row, *args)
    found = prepare_inputs(tables, slot_row, *args)
    _assert_inputs_equal(found, expected)
    assert torch.equal(tables.num_computed_tokens, computed)

    token_ids = torch.tensor([rng.randrange(50) for _ in slots], dtype=torch.int64)
    changed, reasons = token_scatter.reference(tables, found.sample_slots, token_ids)
    assert torch.equal(scatter_tokens(tables, found.sample_slots, token_ids), reasons)
    assert_tables_equal(tables, changed)
