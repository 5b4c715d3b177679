"""What is checked of the machine and of the Python before anything is installed."""

import ast
import importlib.util
import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.launch import libpython, requirements
from engine.launch.errors import ServerStartError
from engine.launch.installation import WHEEL

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_this_machine_and_this_python_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert requirements.main() == 0
    assert capsys.readouterr().out == ""


def test_versions_are_those_of_pyproject() -> None:
    allowed = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 20):
        assert ((3, minor) in requirements.PYTHON_VERSIONS) == (f"3.{minor}" in allowed)


def test_wheel_is_that_of_the_extra() -> None:
    assert PROJECT["optional-dependencies"]["server"] == [str(Requirement(WHEEL))]


def test_old_interpreters_can_parse_the_check() -> None:
    for name in ("__init__.py", "launch/__init__.py", "launch/requirements.py"):
        text = (ROOT / "engine" / name).read_text(encoding="utf-8")
        ast.parse(text, feature_version=(3, 7))


def test_check_needs_the_standard_library_only() -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-S", "-c", "from engine.launch import requirements as r; r.main()"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stderr == ""


@pytest.mark.parametrize("version", [(3, 10, 13), (3, 13, 0), (4, 11, 0)])
def test_wrong_version(
    version: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = ".".join(map(str, version))
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(platform, "python_version", lambda: text)
    assert requirements.main() == 1
    assert capsys.readouterr().out == f"Python {text}: Trident needs 3.11 or 3.12\n"


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_without_venv(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != module or None)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"apt-get install python{version}-venv" in requirements.python_problem()


def test_without_libpython(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ServerStartError("libpython3.11.so.1.0 is missing", "apt-get install libpython3.11")

    monkeypatch.setattr(libpython, "find_libpython", missing)
    assert requirements.python_problem() == (
        "libpython3.11.so.1.0 is missing; apt-get install libpython3.11"
    )


@pytest.mark.parametrize(
    ("libc", "words"),
    [("glibc 2.34", "glibc 2.34"), ("glibc 2.9", "glibc 2.9"), (None, "another C library")],
)
def test_old_or_other_c_library(
    libc: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    problem = requirements.machine_problem()
    assert "glibc 2.35 or newer" in problem
    assert words in problem


@pytest.mark.parametrize("libc", ["glibc 2.35", "glibc 2.40.9000", "glibc 3.0"])
def test_new_c_libraries(libc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "confstr", lambda name: libc)
    assert requirements.machine_problem() == ""


def test_another_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert requirements.main() == 2
    assert "this is Linux on aarch64" in capsys.readouterr().out
