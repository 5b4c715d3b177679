"""The server's log file: read as it grows, kept when the server fails."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from engine.launch import log_file
from engine.launch.errors import ServerStartError
from engine.launch.log_file import LogFile, log_directory


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "trident"


def test_lines_are_returned_when_complete_and_once() -> None:
    log = LogFile("run")
    with log.open() as file:
        file.write(b"a\nb")
        file.flush()
        assert log.lines() == ["a"]
        assert log.lines() == []
        file.write("ü\nc".encode())
        file.flush()
        assert log.lines() == ["bü"]
    assert log.tail() == "a\nbü\nc"


def test_it_stays_small_and_loses_nothing() -> None:
    log = LogFile("run", max_bytes=100)
    seen: list[str] = []
    with log.open() as file:
        for number in range(100):
            for part in (b"line %d\npart" % number, b"\n"):
                file.write(part)
                file.flush()
                seen += log.lines()
                assert log.path.stat().st_size < 120
    assert seen == [text for number in range(100) for text in (f"line {number}", "part")]


def test_what_came_before_it_began_anew_is_still_there() -> None:
    log = LogFile("run", max_bytes=10)
    with log.open() as file:
        for text in (b"a first line\n", b"b\n"):
            file.write(text)
            file.flush()
            log.lines()
    assert Path(f"{log.path}.1").read_text() == "a first line\n"
    assert log.path.read_text() == "b\n"
    log.remove()
    assert not list(log.path.parent.iterdir())
    assert log.tail() == ""


def test_a_file_that_is_gone_has_no_lines(state: Path) -> None:
    log = LogFile("run")
    with log.open() as file:
        file.write(b"a\n")
        file.flush()
        shutil.rmtree(state)
        assert log.lines() == []
        assert log.tail() == ""
    log.remove()


def test_it_begins_anew_where_the_earlier_lines_cannot_be_kept() -> None:
    log = LogFile("run", max_bytes=1)
    Path(f"{log.path}.1").mkdir()  # as on a full disk, nothing can be written there
    with log.open() as file:
        for text in ("a", "b"):
            file.write(f"{text}\n".encode())
            file.flush()
            assert log.lines() == [text]
            assert log.path.stat().st_size == 0


def test_the_last_few_are_kept_and_those_of_running_servers(state: Path) -> None:
    running = LogFile("running")
    with running.open() as file:
        server = subprocess.Popen(["sleep", "60"], stdout=file)
    os.utime(running.path, (0, 0))
    try:
        for number in range(8):
            ended = LogFile(f"ended-{number}")
            ended.open().close()
            Path(f"{ended.path}.1").touch()
            os.utime(ended.path, (number + 1, number + 1))
        LogFile("next")
        names = {path.name for path in state.glob("*.log")}
        assert names == {"running.log", *(f"ended-{number}.log" for number in range(3, 8))}
        assert len(list(state.glob("*.log.1"))) == 5
    finally:
        server.kill()
        server.wait()
    LogFile("after")
    assert not running.path.exists()


def test_others_cannot_read_it(state: Path) -> None:
    assert log_directory() == state
    assert state.stat().st_mode & 0o777 == 0o700


@pytest.fixture
def no_state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state home that is a file, and a temporary directory of the test's own."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_without_a_home_it_is_in_the_temporary_directory(no_state_home: Path) -> None:
    assert log_directory() == no_state_home / f"trident.{os.getuid()}"


def test_a_directory_of_somebody_else_is_not_used(
    no_state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = no_state_home / f"trident.{os.getuid()}"
    target = no_state_home / "elsewhere"
    target.mkdir()
    name.symlink_to(target)
    with pytest.raises(ServerStartError, match=r"trident\.\d+ cannot be used") as caught:
        log_directory()
    assert "XDG_STATE_HOME" in caught.value.hint
    name.unlink()
    name.mkdir()
    owner = os.getuid()
    monkeypatch.setattr(log_file.os, "getuid", lambda: owner + 1)
    monkeypatch.setattr(log_file, "_directories", lambda: iter([name]))
    with pytest.raises(ServerStartError):
        log_directory()


def test_a_relative_state_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert log_directory() == tmp_path / ".local" / "state" / "trident"


def test_the_tail_is_of_the_server_that_was_started_last() -> None:
    log = LogFile("run")
    seen: list[str] = []
    for text in (b"first\n", b"second\n"):
        with log.open() as file:
            file.write(text)
        log.write("from the launcher")
        seen += log.lines()
    assert seen == ["first", "from the launcher", "second", "from the launcher"]
    assert log.tail() == "second\nfrom the launcher\n"


def test_a_server_is_started_again_without_the_log_that_somebody_has_deleted() -> None:
    log = LogFile("run")
    with log.open() as file:
        file.write(b"a long line\n")
    assert log.lines()
    log.path.unlink()
    log.write("nobody reads it")
    assert not log.path.exists()
    with log.open() as file:
        file.write(b"b\n")
    assert log.lines() == ["b"]
