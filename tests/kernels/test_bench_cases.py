"""Every benchmark case at a tiny shape: torch's implementations agree with ours."""

import dataclasses
import warnings

import pytest
import torch

from kernels.bench import sampling
from kernels.bench.case import Case, Work, differs
from kernels.bench.operations import OPERATIONS, all_cases
from tests.kernels.support import DEVICE, randn

CASES = all_cases()


def _tiny(case: Case) -> Case:
    return dataclasses.replace(case, shape={**case.shape, **case.tiny})


def _distinct() -> list[Case]:
    """Return the cases that still differ at their tiny shapes."""
    found = {(case.build, repr(sorted(_tiny(case).shape.items()))): case for case in CASES}
    return list(found.values())


def _build(case: Case) -> Work:
    return case.build(**_tiny(case).shape, device=DEVICE)


@pytest.mark.parametrize("case", _distinct(), ids=lambda case: case.key.replace(" ", "-"))
def test_torchs_forms_compute_the_same(case: Case) -> None:
    work = _build(case)
    ours = work.outcome(work.ours)
    for name, form in {**work.peers, **work.compiled}.items():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            theirs = work.outcome(form)
        assert work.differs(ours, theirs) is None, name


def test_every_case_has_its_own_name_a_peer_and_something_to_count() -> None:
    assert len({case.key for case in CASES}) == len(CASES)
    assert {case.operation for case in CASES} == {operation.name for operation in OPERATIONS}
    for case in _distinct():
        work = _build(case)
        assert work.peers or case.name.startswith("plan of"), case.key
        assert work.bytes or work.flops, case.key


def test_cases_with_an_aim_come_first() -> None:
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
    """A case with random numbers of its own, as on a GPU, must still detect wrong tokens."""
    shape = {"rows": 12, "vocab": 50, "temperature": 0.7, "same_numbers": False}
    work = sampling.draw(**shape, top_k=5, top_p=0.9, device=DEVICE)
    tokens = work.outcome(work.ours)
    for form in work.peers.values():
        drawn = work.outcome(form)
        assert work.differs(tokens, drawn) is None
        assert not torch.equal(tokens[0], drawn[0])
    unfiltered = sampling.draw(**shape, top_k=0, top_p=1.0, device=DEVICE)
    wrong = unfiltered.outcome(unfiltered.ours)
    assert "of torch that the filters drop" in str(work.differs(tokens, wrong))
    assert "of ours that the filters drop" in str(work.differs(wrong, tokens))
