"""A server that dies is started again: when, on which ports, and what is left of the one before."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engine import restart_delay
from engine.launch import server as launch_server
from engine.launch.installation import from_release, python_version
from engine.launch.run_directory import RunDirectory
from engine.launch.server import TritonServer
from engine.restart_delay import RestartDelay
from tests.engine.launch.installations import installation_of, make_release, touch

# In place of tritonserver: each start takes the next line of a file, which says what it does.
FAKE = f"""#!{sys.executable}
import os, sys, time
from pathlib import Path
file = Path(os.environ["FAKE_LIVES"])
word, *left = file.read_text().split() or ["stay"]
file.write_text(" ".join(left))
with Path(os.environ["FAKE_SEEN"]).open("a") as seen:
    print(*sys.argv, file=seen)
if word == "fails":
    sys.exit("error: no memory")
print("Started GRPCInferenceService", flush=True)
if word == "finishes":
    print("2026-01-31 12:00:00.123 INFO trident.request: request finished uid=1", flush=True)
time.sleep(0.2)
if word == "hangs":
    print("Signal (11) received.", flush=True)
if word in ("stay", "hangs"):
    time.sleep(60)
if word == "crashes":
    print("terminate called after throwing an instance of 'lock_exception'", flush=True)
    os.abort()
sys.exit(3)
"""
ONLY_GRPC = ("--allow-http=false", "--allow-metrics=false")


class EnoughError(Exception):
    """The test has seen enough."""


class Lives:
    """A server whose processes do as they are told, one after the other."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(folder))
        monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
        monkeypatch.setattr(restart_delay, "_FIRST_S", 0.01)
        binary = make_release(folder / "opt", python_version())
        binary.write_text(FAKE)
        binary.chmod(0o755)
        release = installation_of(from_release(binary))
        monkeypatch.setattr(launch_server, "find_tritonserver", lambda: release)
        touch(folder / "repository" / "ensemble" / "config.pbtxt")
        self.folder = folder
        self.lines: list[str] = []
        self._lives, self._seen = folder / "lives", folder / "seen"
        variables = {"FAKE_LIVES": str(self._lives), "FAKE_SEEN": str(self._seen)}
        self.server = TritonServer(
            {"log_format": log_format},
            repository=folder / "repository",
            ports=0,
            arguments=ONLY_GRPC,
            environ={**os.environ, **variables},
            on_line=self.lines.append,
        )

    @property
    def commands(self) -> list[str]:
        return self._seen.read_text().splitlines()

    @property
    def notes(self) -> list[str]:
        return [line for line in self.lines if "trident.launch" in line]

    @property
    def runs(self) -> list[Path]:
        return list(self.folder.glob("trident-*"))

    def run(self, lives: str, until: Callable[[], bool]) -> None:
        """Start, and go on until the condition holds."""
        self._lives.write_text(lives)

        deadline = time.monotonic() + 60

        def check() -> None:
            assert time.monotonic() < deadline
            if until():
                raise EnoughError

        try:
            self.server.start()
            with pytest.raises(EnoughError):
                self.server.keep_running(check)
        finally:
            self.server.stop()


@pytest.fixture(params=["text"])
def lives(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lives:
    return Lives(tmp_path, monkeypatch, request.param)


def test_delay_doubles_until_a_process_has_finished_a_request() -> None:
    delay = RestartDelay()
    assert [delay.next() for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert {delay.next() for _ in range(2000)} == {30}
    delay.succeeded()
    assert [delay.next() for _ in range(3)] == [0, 0.5, 1]


def test_a_dead_server_is_started_again_on_its_ports(lives: Lives) -> None:
    lives.run("ends crashes fails stay", lambda: len(lives.commands) == 4)
    first, *others = lives.commands
    assert {_without_run(each) for each in others} == {_without_run(first)}


def _without_run(command: str) -> str:
    return " ".join(word for word in command.split() if "trident-" not in word)


def test_the_log_says_why_it_died_and_when_it_is_started_again(lives: Lives) -> None:
    def is_last() -> bool:
        return len(lives.commands) == 6

    lives.run("ends crashes fails finishes ends stay", is_last)
    notes = [line.partition("trident.launch: ")[2] for line in lives.notes]
    assert notes[:8] == [
        "tritonserver ended with status 3; starting it again in 0 s",
        "tritonserver is ready again",
        "tritonserver was killed by SIGABRT (terminate called after throwing an instance of "
        "'lock_exception'); starting it again in 0.01 s",
        "tritonserver could not be started again: no memory; starting it again in 0.02 s",
        "tritonserver is ready again",
        "tritonserver ended with status 3; starting it again in 0 s",
        "tritonserver is ready again",
        "tritonserver ended with status 3; starting it again in 0.01 s",
    ]
    assert lives.server.log_path.exists()  # it says why


@pytest.mark.parametrize("lives", ["json"], indirect=True)
def test_notes_have_the_form_of_the_other_lines(lives: Lives) -> None:
    lives.run("ends stay", lambda: len(lives.notes) == 2)
    records = [json.loads(line) for line in lives.notes]
    assert [each["level"] for each in records] == ["WARNING", "INFO"]
    assert records[1]["event"] == "tritonserver is ready again"


def test_nothing_piles_up_over_restarts(lives: Lives) -> None:
    figures: list[tuple[int, int, int]] = []
    own = psutil.Process()

    def is_over() -> bool:
        figure = own.num_fds(), len(lives.runs), len(own.children())
        if len(lives.commands) > len(figures):
            figures.append(figure)
        return len(figures) == 6

    lives.run("finishes " * 5, is_over)
    assert len(set(figures)) == 1
    assert lives.runs == []
    assert len(list((lives.folder / "state" / "trident").iterdir())) == 1


def test_a_server_that_hangs_in_its_crash_is_killed(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_server, "_CRASHING_S", 0.5)
    lives.run("hangs stay", lambda: len(lives.commands) == 2)
    assert "tritonserver has crashed, and hangs; starting it again in 0 s" in lives.notes[0]


def test_what_the_machine_lacks_meanwhile_is_waited_for(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []

    def scarce() -> RunDirectory:
        calls.append(None)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return RunDirectory()

    monkeypatch.setattr(launch_server, "RunDirectory", scarce)
    lives.run("ends stay", lambda: len(lives.commands) == 2)
    assert "could not be started again: [Errno 28] No space left" in lives.notes[1]


def test_a_signal_that_comes_while_the_dead_server_is_cleared_away_is_not_lost(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    clear, cleared = launch_server.kill_all, []

    def interrupted(run_id: str) -> None:
        signal.raise_signal(signal.SIGINT)
        clear(run_id)
        cleared.append(run_id)

    monkeypatch.setattr(launch_server, "kill_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lives.run("ends", lambda: False)
    assert cleared
    assert lives.runs == []


def test_a_signal_ends_the_delay(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_delay, "_FIRST_S", 20)
    lives.run("ends ends", lambda: "starting it again in 20 s" in "".join(lives.notes))
    assert len(lives.commands) == 2
    assert lives.runs == []
