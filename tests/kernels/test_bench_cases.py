"""Every benchmark case at a tiny shape: torch's implementations agree with ours."""

import pytest
import torch

from engine.bench.kernels import sampling
from engine.bench.kernels.case import Case, differs
from engine.bench.kernels.cases import all_cases
from tests.kernels.support import DEVICE, randn

CASES = all_cases()


def _distinct() -> list[Case]:
    """Return the cases that still differ at their tiny shapes."""
    tiny = [case.tiny_case() for case in CASES]
    return list(
        {(str(case.build), repr(sorted(case.shape.items()))): case for case in tiny}.values()
    )


@pytest.mark.parametrize("case", _distinct(), ids=lambda case: case.key.replace(" ", "-"))
def test_torchs_forms_compute_the_same(case: Case) -> None:
    work = case.build(**case.shape, device=DEVICE)
    assert work.bytes or work.flops
    ours = work.outcome(work.ours)
    for form in filter(None, (*work.peers.values(), work.compiled)):
        assert work.differs(ours, work.outcome(form)) is None


def test_cases_have_names_of_their_own_and_those_with_an_aim_come_first() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    aims = [case.aim is not None for case in CASES]
    assert aims == sorted(aims, reverse=True)
    assert any(aims)


def test_results_that_differ_are_told_apart() -> None:
    x = randn(64, 64)
    ids = torch.arange(5, device=DEVICE)
    assert differs((x, ids), (x * (1 + 1e-6), ids)) is None
    assert differs(x.half(), x) is None
    assert "relative RMS" in str(differs(x, x * 1.001))
    assert "relative RMS nan of output 1" in str(differs((x, x), (x, x / 0)))
    assert differs((x, ids), (x, ids + (ids == 3))) == "1 of 5 values of output 1"
    assert "shapes" in str(differs(x, (x, x)))
    assert "shapes" in str(differs(x, x[:3]))


def test_tokens_outside_the_filters_are_detected() -> None:
    filtered, free = (
        sampling.draw(12, 50, 0.7, top_k, top_p, DEVICE) for top_k, top_p in ((5, 0.9), (0, 1.0))
    )
    tokens, wrong = filtered.outcome(filtered.ours), free.outcome(free.ours)
    assert "of torch that the filters drop" in str(filtered.differs(tokens, wrong))
    assert "of ours that the filters drop" in str(filtered.differs(wrong, tokens))
