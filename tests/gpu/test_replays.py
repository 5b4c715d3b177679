"""Ten thousand ragged steps give the same bits whenever they are run again, beside other work."""

from functools import cache

import pytest
import torch

from tests.gpu.replays.episodes import STEPS, Player
from tests.gpu.replays.models import models

_EPISODES = 100  # of each model
_IN_TEST = 10


@cache
def player(label: str, device: torch.device) -> Player:
    return Player(models(tiny=device.type == "cpu")[label], device)


@pytest.mark.parametrize(
    "first",
    range(0, _EPISODES, _IN_TEST),
    ids=lambda first: f"{'first' if first < _EPISODES // 2 else 'second'}-{first}",
)
@pytest.mark.parametrize("label", models())
def test_every_run_of_a_step_gives_the_same_bits(
    label: str, first: int, device: torch.device
) -> None:
    if device.type == "cpu" and first:
        pytest.skip("no races to be found")
    session = player(label, device)
    unequal = [line for n in range(first, first + _IN_TEST) for line in session.episode(n)]
    assert unequal == []
    assert session.steps.take_kinds().total() == _IN_TEST * STEPS
