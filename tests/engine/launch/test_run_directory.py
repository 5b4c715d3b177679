"""The private directory of a server: what it holds, and what of it is removed."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from engine.launch import run_directory
from engine.launch.installation import STUB, from_release, from_wheel, python_version
from engine.launch.libpython import library_name
from engine.launch.run_directory import RunDirectory, remove_stale
from tests.engine.launch.installations import (
    OTHER_VERSION,
    installation_of,
    make_release,
    make_wheel,
    touch,
)


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(run_directory, "_SHARED_MEMORY", tmp_path / "shm")


def test_backends_get_the_stub_with_its_run_bit(tmp_path: Path) -> None:
    wheel = installation_of(from_wheel(make_wheel(tmp_path, (OTHER_VERSION, python_version()))))
    wheel.stubs[python_version()].write_bytes(b"the right one")
    run = RunDirectory()
    backends = run.add_backends(wheel)
    stub = run.path / "stub" / STUB
    assert stub.read_bytes() == b"the right one"
    assert all(os.access(each, os.X_OK) for each in (stub, backends / "python" / STUB))
    assert sorted(p.name for p in (backends / "python").iterdir()) == [
        "libtriton_python.so",
        STUB,
    ]
    run.remove()


def test_backends_of_a_release_are_all_there(tmp_path: Path) -> None:
    release = installation_of(from_release(make_release(tmp_path, python_version())))
    touch(tmp_path / "backends" / "other" / "libtriton_other.so")
    run = RunDirectory()
    backends = run.add_backends(release)
    assert (backends / "other" / "libtriton_other.so").is_file()
    assert (backends / "python" / "libtriton_python.so").is_file()
    run.remove()


@pytest.mark.parametrize("name", ["tmp ü", "a b", "it's", "$HOME"])
def test_directory_has_a_name_that_needs_no_quotes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    monkeypatch.setattr(run_directory, "_PLAIN_TEMPORARY", str(tmp_path / "tmp"))
    run = RunDirectory()
    assert run.path.parent == tmp_path / "tmp"
    os.close(run.lock)
    remove_stale()
    assert not run.path.exists()


def test_stub_starts_with_its_arguments_in_an_empty_directory(tmp_path: Path) -> None:
    wheel = installation_of(from_wheel(make_wheel(tmp_path, (python_version(),))))
    wheel.stubs[python_version()].write_bytes(b'#!/bin/sh\npwd; ls -A; echo "$0" "$@"\n')
    run = RunDirectory()
    stub = run.add_backends(wheel) / "python" / STUB
    printed = subprocess.run([stub, "a b", "*"], capture_output=True, text=True, check=True).stdout
    assert printed == f"{run.path / 'empty'}\n{run.path / 'stub' / STUB} a b *\n"
    run.remove()


def test_library_folder_holds_libpython_only() -> None:
    run = RunDirectory()
    assert [p.name for p in run.add_libpython().iterdir()] == [library_name()]
    run.remove()


def test_remove_takes_its_shared_memory_and_no_other(tmp_path: Path) -> None:
    run = RunDirectory()
    touch(tmp_path / "shm" / f"{run.shared_memory_prefix}1")
    other = touch(tmp_path / "shm" / "trident-other-1")
    run.remove()
    run.remove()
    assert not run.path.exists()
    assert list((tmp_path / "shm").iterdir()) == [other]


def test_left_overs_of_a_killed_launcher_go_with_the_next_start(tmp_path: Path) -> None:
    killed = RunDirectory()
    touch(tmp_path / "shm" / f"{killed.shared_memory_prefix}1")
    os.close(killed.lock)
    running = RunDirectory()
    assert not killed.path.exists()
    assert not list((tmp_path / "shm").iterdir())
    remove_stale()
    assert running.path.exists()
    running.remove()


def test_a_lock_that_the_server_inherited_protects() -> None:
    run = RunDirectory()
    inherited = os.dup(run.lock)
    os.close(run.lock)
    remove_stale()
    assert run.path.exists()
    os.close(inherited)
    remove_stale()
    assert not run.path.exists()


def test_directories_of_others_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "tmp" / "trident-notes"
    theirs.mkdir()
    remove_stale()
    assert theirs.exists()


def test_lock_is_exclusive() -> None:
    run = RunDirectory()
    other = os.open(run.path / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)
    run.remove()


def test_the_ensemble_is_served_under_another_name(tmp_path: Path) -> None:
    own = tmp_path / "repository"
    for model in ("ensemble", "engine"):
        touch(own / model / "config.pbtxt")
    touch(own / "README.md")
    run = RunDirectory()
    repository = run.add_repository(own, "vllm_model")
    assert {p.name: p.resolve() for p in repository.iterdir()} == {
        "vllm_model": own / "ensemble",
        "engine": own / "engine",
    }
    run.remove()
    assert (own / "ensemble" / "config.pbtxt").is_file()
