"""The steps that an engine runs."""

import pytest

from engine import LLM
from engine.core.schedule import SchedulerOutput


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """Return a list that gets every step from now on."""
    seen: list[SchedulerOutput] = []
    runner = llm._core._runner
    forward = runner.forward

    def noted(schedule: SchedulerOutput) -> None:
        seen.append(schedule)
        forward(schedule)

    monkeypatch.setattr(runner, "forward", noted)
    return seen
