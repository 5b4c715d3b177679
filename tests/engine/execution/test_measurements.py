"""Measurements are made once, and again where what is remembered cannot be used."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.execution import cpu_choices
from engine.execution.cpu_choices import remembered


class Figures(msgspec.Struct):
    threads: int
    speed: dict[int, float]


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_choices._OthersTime, "share", lambda self: 0.0)
    return tmp_path / "cache" / "trident" / "measurements.json"


def counted(*values: int) -> Callable[[], int]:
    left = list(values)
    return lambda: left.pop(0)


def test_a_second_start_does_not_measure(file: Path) -> None:
    measure = counted(3, 4)
    assert [remembered(("threads", 2), measure, int) for _ in range(3)] == [3, 3, 3]
    assert remembered(("threads", 8), measure, int) == 4
    assert len(json.loads(file.read_bytes())) == 2


def test_what_is_remembered_comes_back_as_it_was() -> None:
    figures = Figures(2, {1: 1.5, 16: 0.75})
    assert remembered("figures", lambda: figures, Figures) == figures
    assert remembered("figures", lambda: pytest.fail("measured twice"), Figures) == figures


@pytest.mark.parametrize("name", ["processor_name", "library_name"])
def test_another_machine_measures_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = counted(3, 4)
    assert remembered("threads", measure, int) == 3
    monkeypatch.setattr(cpu_choices, name, lambda: "another")
    assert remembered("threads", measure, int) == 4


def test_what_was_disturbed_is_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_choices._OthersTime, "share", lambda self: 0.5)
    assert [remembered("threads", each, int) for each in (lambda: 1, lambda: 2)] == [1, 2]
    assert not file.exists()


def test_the_time_of_others_does_not_count_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    others = cpu_choices._OthersTime()
    assert others.share() == 1.0  # too early to tell
    began, used = time.monotonic(), time.process_time()
    while time.process_time() - used < 0.4:  # others may take most of the processors
        sum(range(1000))
    elapsed = time.monotonic() - began
    own = (time.process_time() - used) / (elapsed * (os.cpu_count() or 1))
    assert others.share() < 1 - own + 0.1


@pytest.mark.parametrize("content", [b"", b"[]", b"no JSON", b'{"a": 1'])
def test_a_broken_file_is_replaced(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    assert remembered("threads", lambda: 3, int) == 3
    assert list(json.loads(file.read_bytes()).values()) == [3]


def test_an_entry_of_another_kind_is_measured_again(file: Path) -> None:
    assert remembered("threads", lambda: 3, int) == 3
    assert remembered("threads", lambda: Figures(1, {}), Figures) == Figures(1, {})
    assert len(json.loads(file.read_bytes())) == 1


def test_without_a_place_each_start_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(taken))
    assert [remembered("threads", each, int) for each in (lambda: 1, lambda: 2)] == [1, 2]


def test_the_oldest_are_forgotten(file: Path) -> None:
    for number in range(cpu_choices._MOST_ENTRIES + 5):
        remembered(number, lambda number=number: number, int)
    assert list(json.loads(file.read_bytes()).values()) == [
        *range(5, cpu_choices._MOST_ENTRIES + 5)
    ]
    assert not list(file.parent.glob("tmp*"))
