"""How the draw divides the rows of a test."""

import pytest

from kernels.sampling import draw
from tests.kernels.sampling.draw_cases import SMALL


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "settings", lambda vocab: SMALL)


@pytest.fixture(params=[False, True], ids=["default", "small"])
def division(request: pytest.FixtureRequest) -> None:
    if request.param:
        request.getfixturevalue("small")
