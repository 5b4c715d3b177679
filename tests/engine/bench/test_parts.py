"""Every part runs, on a tiny model; one that fails does not take the others along."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from engine.bench import ceilings
from engine.bench.decode import Decode
from engine.bench.driver import EngineDriver
from engine.bench.parts import Group, groups
from engine.bench.prefill import Prefill
from engine.bench.shapes import TINY
from engine.bench.wait_clock import WaitClock
from engine.bench.worker import measure
from engine.bench.workload import SMALL
from engine.execution.pending_step import PendingStep

CPU = torch.device("cpu")
ENGINE, FEW, ALL = groups([TINY], SMALL)


def figures_of(group: Group, deadline: float | None = None) -> dict[str, dict[str, Any]]:
    """Measure all parts; return the messages by part."""
    said: list[dict[str, Any]] = []
    keys = [part.key for part in group.parts]
    measure(group, keys, CPU, deadline or time.time() + 100, said.append)
    assert [message["begins"] for message in said if "begins" in message][:1] == keys[:1]
    found = {message.pop("case"): message for message in said if "case" in message}
    assert list(found) == keys
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return figures_of(ENGINE) | figures_of(FEW) | figures_of(ALL)


def test_every_part_is_measured(found: dict[str, dict[str, Any]]) -> None:
    limits = ceilings.measure(CPU)
    assert all(value is not None and value > 0 for value in limits.values())
    for part in (*ENGINE.parts, *FEW.parts, *ALL.parts):
        figures = found[part.key]
        assert figures["status"] == "measured", figures
        assert figures["seconds"] > 0
        assert part.floor(figures, limits) > 0


def test_a_decode_step_has_the_context_that_was_asked_for(found: dict[str, dict[str, Any]]) -> None:
    for part in ENGINE.parts:
        if isinstance(part, Decode):
            figures = found[part.key]
            # Sequences that were computed first have got tokens while the last ones were.
            assert 0 <= figures["context"] - part.workload.context <= part.batch
            assert figures["tokens_per_second"] == pytest.approx(part.batch / figures["seconds"])


def test_offline_tokens_per_second_count_every_token(found: dict[str, dict[str, Any]]) -> None:
    totals = {
        part.count: sum(max_tokens for _, max_tokens in part.requests())
        for part in (*FEW.parts, *ALL.parts)
    }
    for figures, count in (
        (found["tiny offline, 8 sequences"], 8),
        (found["tiny offline, 4 sequences"], 4),
        (found["tiny transformers generate, 4 sequences"], 4),
        (found["tiny transformers continuous batching, 8 sequences"], 8),
    ):
        assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(totals[count])


def test_a_part_that_fails_leaves_the_engine_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(part: Decode, session: EngineDriver) -> dict[str, Any]:
        session.add([1, 2, 3], 50)
        session.core.step()
        raise RuntimeError("broken\nand more")

    monkeypatch.setattr(Decode, "measure", broken)
    found = figures_of(ENGINE)
    states = {part.key: found[part.key]["status"] for part in ENGINE.parts}
    for part in ENGINE.parts:
        assert states[part.key] == ("failed" if isinstance(part, Decode) else "measured")
    assert found[ENGINE.parts[0].key]["reason"] == "RuntimeError: broken"


def test_a_model_that_cannot_be_loaded_fails_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineDriver, "__init__", lambda *_: 1 / 0)
    assert {figures["status"] for figures in figures_of(ENGINE).values()} == {"failed"}


def test_what_is_left_at_the_deadline_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures_of(FEW, deadline=time.time() - 1)
    assert {figures["status"] for figures in found.values()} == {"left out"}
    # And a long part ends there.
    measured = Prefill.measure

    def last(part: Prefill, session: EngineDriver) -> dict[str, Any]:
        figures = measured(part, session)
        session.deadline = 0.0
        return figures

    monkeypatch.setattr(Prefill, "measure", last)
    offline = figures_of(ENGINE)["tiny offline, 8 sequences"]
    assert offline == {"status": "left out", "reason": "no time was left to end it"}


def test_the_clock_counts_waiting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PendingStep, "wait", lambda sent: time.sleep(0.05))
    sent = PendingStep.__new__(PendingStep)
    clock = WaitClock()
    sent.wait()
    assert clock.seconds == 0
    with clock.running():
        time.sleep(0.02)
        sent.wait()
    sent.wait()
    assert 0.05 <= clock.seconds < 0.07
