"""Steps that give other bits in a second run are found, and found again by their seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine.core.schedule import SchedulerOutput
from engine.execution.graphs.graph_sizes import decode_sizes
from tests.factories.replayed_graphs import ReplayedGraph, ReplayingCapturer
from tests.gpu.replays import episodes
from tests.gpu.replays.episodes import Player
from tests.gpu.replays.models import models

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def session() -> Player:
    return Player(models(tiny=True)["gqa"], CPU)


@pytest.mark.parametrize("label", models())
def test_steps_of_all_kinds_give_the_same_bits(label: str) -> None:
    session = Player(models(tiny=True)[label], CPU)
    assert [line for episode in range(8) for line in session.episode(episode, 5)] == []
    kinds = session.steps.take_kinds()
    assert kinds.keys() == {"decode", "mixed", "prefill"}
    assert kinds.total() == 8 * 5


def _watch(session: Player, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets the arrays of every step that is run."""
    seen: list[Any] = []
    runner = session.steps._runner
    forward = runner.forward

    def watched(schedule: SchedulerOutput) -> None:
        tables = runner._tables.buffer.clone().numpy()
        seen.append((schedule.slots, schedule.num_tokens, tables))
        forward(schedule)

    monkeypatch.setattr(runner, "forward", watched)
    return seen


def test_a_seed_determines_the_step_whatever_ran_before(
    session: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _watch(session, monkeypatch)
    session.episode(7, 6, again=5)
    first = list(seen)
    for other in range(3):
        session.episode(other)
    seen.clear()
    session.episode(7, 6, again=5)
    assert len(first) == len(seen) > episodes._AGAIN
    for one, other in zip(first, seen, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
    seen.clear()
    session.episode(8, 6)
    assert any(not np.array_equal(a[1], b[1]) for a, b in zip(first, seen, strict=False))


class Race:
    """Changes one value in every `every`-th call of a function."""

    def __init__(self, every: int) -> None:
        self.calls, self.every = 0, every

    def strikes(self) -> bool:
        self.calls += 1
        return self.calls % self.every == 0


def _tables(runner: Any, result: Any) -> None:
    runner._tables.num_tokens[-1] += 1


def _cache(runner: Any, result: Any) -> None:
    """Change the last bit of one value that no token depends on yet."""
    runner._kv_cache[0].key.view(torch.int16)[-1, -1, -1, -1] ^= 1


def _hidden(runner: Any, result: Any) -> None:
    result[0].view(torch.int16)[:, 0] ^= 1


@pytest.mark.parametrize(
    ("method", "change", "every", "named"),
    [
        ("_run_sample", _tables, 17, "slot tables"),
        ("_run_forward", _cache, 13, "as served, run 2 of 2: KV cache 0"),
        ("_compute", _hidden, 13, "hidden states"),
    ],
)
def test_a_race_is_found_and_found_again_by_its_seed(
    method: str,
    change: Callable[[Any, Any], None],
    every: int,
    named: str,
    session: Player,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    race, runner = Race(every), session.steps._runner
    run = getattr(runner, method)

    def racing(*args: Any) -> Any:
        result = run(*args)
        if race.strikes():
            change(runner, result)
        return result

    monkeypatch.setattr(runner, method, racing)
    unequal = [line for episode in range(3) for line in session.episode(episode)]
    assert 0 < len(unequal) < 3 * episodes.STEPS
    assert any(named in line for line in unequal)
    label, episode, step = unequal[0].split(": ")[0].split(":")
    assert label == "gqa"
    again = session.episode(int(episode), int(step) + 1, again=int(step))
    assert any(line.startswith(f"{label}:{episode}:{step}: as served, run") for line in again)


def test_one_seed_is_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert episodes.again("vocab:3:2") == 0
    assert capsys.readouterr().out == "vocab:3:2: 100 runs gave the same bits\n"


def test_a_race_in_a_graph_is_found_where_the_same_kernels_alone_have_none(
    session: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, capturer = session.steps._runner, ReplayingCapturer()
    with torch.inference_mode():
        runner.capture_graphs(capturer, lambda done, total: None)
    assert [line for episode in range(3) for line in session.episode(episode)] == []
    # Each size of the sampling has a graph with filters and one without.
    num_sampling = 2 * len(decode_sizes(runner._config.max_num_seqs))
    assert sum(capturer.num_replays[:-num_sampling]) > 0
    assert sum(capturer.num_replays[-num_sampling:]) > 0
    race, replay = Race(29), ReplayedGraph.replay

    def racing(graph: ReplayedGraph) -> None:
        replay(graph)
        if race.strikes():
            runner._kv_cache[1].value.view(torch.int16)[-1, -1, -1, -1] ^= 1

    monkeypatch.setattr(ReplayedGraph, "replay", racing)
    unequal = [line for episode in range(3) for line in session.episode(episode)]
    assert unequal
    assert all("as served, run 2 of 2: KV cache 3" in line for line in unequal)
