"""The steps that an engine runs."""

import pytest

from engine import LLM
from engine.core.schedule import Schedule


def steps_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Return a list that gets every step from now on."""
    seen: list[Schedule] = []
    runner = llm._core._runner
    forward = runner.forward

    def noted(schedule: Schedule) -> None:
        seen.append(schedule)
        forward(schedule)

    monkeypatch.setattr(runner, "forward", noted)
    return seen
