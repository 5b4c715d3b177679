"""Grammars that take long delay no step, and those that have cost least come first."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from engine.core.constraints import mask_workers
from engine.core.constraints.mask_workers import Drawn, MaskWorkers
from engine.text.grammar.host_budget import HostBudget

_FOR_EVER_S = 60.0  # longer than any of these tests may take


class _Grammar:
    """Advances when `opened` is set; notes when it has, and how willing its thread was."""

    def __init__(self, log: list[str], name: str, opened: threading.Event, spent_s: float) -> None:
        self.budget = HostBudget()
        self.budget.spent_s = spent_s
        self._log, self._name, self._opened = log, name, opened
        self.niceness: int | None = None
        self.has_executor = False
        self.begun = threading.Event()

    @property
    def is_fast(self) -> bool:
        return self.budget.is_small

    def needs_advance(self, token_id: int) -> bool:
        return self.niceness is None

    def advance(self, token_id: int, executor: object | None) -> None:
        self.begun.set()
        assert self._opened.wait(_FOR_EVER_S)
        self._log.append(self._name)
        self.has_executor = executor is not None
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def _drawn(grammar: _Grammar, is_wanted: Callable[[], bool] = lambda: True) -> Drawn:
    return Drawn(grammar, 5, is_wanted)  # type: ignore[arg-type]


def _wait_for(workers: MaskWorkers, *drawn: Drawn) -> None:
    while not all(each.is_ready for each in drawn):
        workers.wait_for_any(0.1)


def test_a_step_waits_for_cheap_grammars(
    log: list[str], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_workers, "_STEP_S", _FOR_EVER_S)
    workers = MaskWorkers()
    drawn = [_drawn(_Grammar(log, str(i), gate, 0)) for i in range(20)]
    threading.Timer(0.01, gate.set).start()
    workers.begin(drawn)
    workers.wait()
    assert all(each.is_ready for each in drawn)


def test_a_step_waits_once_for_grammars_that_are_cheap_no_more(
    log: list[str], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_workers, "_STEP_S", 0.0)
    workers = MaskWorkers()
    hostile = [_drawn(_Grammar(log, str(i), gate, 0)) for i in range(20)]
    workers.begin(hostile)
    workers.wait()
    monkeypatch.setattr(mask_workers, "_STEP_S", _FOR_EVER_S)
    opened = threading.Event()
    opened.set()
    good = _drawn(_Grammar(log, "good", opened, 0))
    workers.begin([good])
    workers.wait()  # returns: what was waited for is under way
    assert not any(each.is_ready for each in hostile)
    gate.set()
    _wait_for(workers, good, *hostile)
    last = _drawn(_Grammar(log, "last", opened, 0))
    workers.begin([last])
    workers.wait()
    assert last.is_ready


def test_no_step_waits_for_expensive_grammars_which_have_a_thread_of_their_own(
    log: list[str], gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mask_workers, "_STEP_S", _FOR_EVER_S)
    workers, opened = MaskWorkers(), threading.Event()
    opened.set()
    slow = [_Grammar(log, str(i), gate, spent_s=10.0 - i) for i in range(10)]
    good = _Grammar(log, "good", opened, spent_s=0)
    workers.begin([_drawn(slow[0])])
    assert slow[0].begun.wait(_FOR_EVER_S)  # the others come while it is under way
    for grammar in slow[1:]:
        workers.begin([_drawn(grammar)])
    workers.begin([_drawn(good)])
    workers.wait()
    assert log == ["good"]
    gate.set()
    _wait_for(workers, *map(_drawn, slow))
    assert log[2:] == [str(i) for i in range(9, 0, -1)], "the cheapest first"
    assert not good.has_executor
    assert all(grammar.has_executor for grammar in slow)
    assert slow[0].niceness is not None
    assert good.niceness is not None
    assert slow[0].niceness >= min(good.niceness + 1, 19)  # 19 is the most


def test_a_token_that_nobody_waits_for_is_not_followed(
    log: list[str], gate: threading.Event
) -> None:
    workers, is_wanted = MaskWorkers(), True
    blocker, aborted, last = (_Grammar(log, name, gate, 10.0) for name in ("first", "no", "last"))
    aborted.budget.spent_s, last.budget.spent_s = 11.0, 12.0
    workers.begin([_drawn(blocker), _drawn(aborted, lambda: is_wanted), _drawn(last)])
    is_wanted = False
    gate.set()
    _wait_for(workers, _drawn(last))
    assert log == ["first", "last"]
