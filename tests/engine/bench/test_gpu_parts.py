"""Every part runs, on a tiny model; one that fails does not take the others along."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from engine.bench import ceilings
from engine.bench.gpu import plan
from engine.bench.gpu.engine import EngineSession
from engine.bench.gpu.kernels import KernelSession
from engine.bench.gpu.part import Figures, Group
from engine.bench.gpu.worker import measure
from engine.bench.gpu.workload import SMALL
from kernels.bench.case import Call, Case, Work
from kernels.bench.shapes import TINY

CPU = torch.device("cpu")
GROUPS = {group.name: group for group in plan.groups(tiny=True)}
ENGINE, PEER = GROUPS["tiny engine"], GROUPS["tiny transformers"]


def figures_of(group: Group, deadline: float | None = None) -> dict[str, Figures]:
    """Measure all parts; return the messages by part."""
    said: list[dict[str, Any]] = []
    measure(group, group.keys, CPU, deadline or time.time() + 100, said.append)
    assert said[0] == {"begins": group.keys[0]}
    found = {message.pop("ends"): message for message in said if "ends" in message}
    assert list(found) == group.keys
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Figures]:
    return figures_of(ENGINE) | figures_of(PEER)


def test_every_part_is_measured(found: dict[str, Figures]) -> None:
    limits = ceilings.measure(CPU)
    assert limits.keys() == {"read", "bf16", "int8"}
    for part in (*ENGINE.parts, *PEER.parts):
        figures = found[part.key]
        assert figures["status"] == "measured", figures
        assert figures["seconds"] > 0
        assert part.floor is None or part.floor(figures, limits) > 0
        assert part.beside is None or part.beside in found


def test_a_decode_step_has_the_context_that_was_asked_for(found: dict[str, Figures]) -> None:
    for batch in SMALL.batches:
        figures = found[f"tiny decode step, B = {batch}"]
        # Sequences that were computed first have got tokens while the last ones were.
        assert 0 <= figures["context"] - SMALL.context <= batch
        assert figures["tokens_per_second"] == pytest.approx(batch / figures["seconds"])


def test_offline_tokens_per_second_count_every_token(found: dict[str, Figures]) -> None:
    for name, count in (("offline", 8), ("offline", 4), ("transformers continuous batching", 4)):
        figures = found[f"tiny {name}, {count} sequences"]
        total = sum(most for _, most in SMALL.offline(TINY.vocab)[:count])
        assert figures["tokens_per_second"] * figures["seconds"] == pytest.approx(total)


def test_a_part_that_fails_leaves_the_engine_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(session: EngineSession, batch: int) -> Figures:
        session._add([1, 2, 3], 50)
        session.core.step()
        raise RuntimeError("broken\nand more")

    # Parts hold the functions of the class.
    monkeypatch.setattr(EngineSession.decode, "__code__", broken.__code__)
    found = figures_of(ENGINE)
    for key, figures in found.items():
        assert figures["status"] == ("failed" if "decode" in key else "measured")
    assert found[ENGINE.keys[0]]["reason"] == "RuntimeError: broken"


def test_a_model_that_cannot_be_loaded_fails_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineSession, "__init__", lambda *_: 1 / 0)
    assert {figures["status"] for figures in figures_of(ENGINE).values()} == {"failed"}


def test_what_is_left_at_the_deadline_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    found = figures_of(PEER, deadline=time.time() - 1)
    assert {figures["status"] for figures in found.values()} == {"left out"}
    # And a long part ends there.
    session = EngineSession(TINY, SMALL, CPU, 0.0)
    with pytest.raises(TimeoutError, match="no time was left"):
        session.offline(8, 0.0)


def _case(**work: Any) -> Case:
    def build(device: torch.device) -> Work:
        x = torch.ones(4, device=device)
        peers = {"same": Call(torch.neg, x), "other": Call(torch.neg, x * 2)}
        return Work(Call(torch.neg, x), peers, compiled=Call(torch.neg, x), bytes=16)

    return Case("rms_norm", "a", build, {}, {}, **work)


def test_a_form_that_computes_something_else_gets_no_figure() -> None:
    figures = KernelSession(CPU, 0.0).measure(_case())
    assert figures["seconds"] > 0
    assert figures["bytes"] == 16
    assert figures["peers"]["same"]["seconds"] > 0
    assert "relative RMS" in figures["peers"]["other"]["differs"]
    assert "torch.compile" not in figures["peers"]


def test_compilation_ends_when_its_seconds_are_over() -> None:
    session = KernelSession(CPU, 0.0)
    session._compile_seconds = 0.0
    assert "were over" in session.measure(_case(compile=True))["peers"]["torch.compile"]["reason"]
