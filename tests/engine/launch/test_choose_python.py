"""engine/launch/choose-python, with stand-ins for interpreters that lack something."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "engine" / "launch" / "choose-python"
THIS = f'exec {sys.executable} "$@"'
TOO_NEW = "echo 'Python 3.13.0: Trident needs 3.11 or 3.12'; exit 1"
SHIM = "echo 'pyenv: command not found' >&2; exit 127"  # of a version that is not active
NO_MACHINE = "echo 'this is Linux on riscv64'; exit 2"

Choose = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    def run(*named: str, **interpreters: str) -> subprocess.CompletedProcess[str]:
        for name, script in interpreters.items():
            program = tmp_path / name.replace("_", ".")
            program.write_text(f"#!/bin/sh\n{script}\n")
            program.chmod(0o755)
        for tool in ("dirname", "tail"):
            (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
        return subprocess.run(
            ["/bin/sh", SCRIPT, *named], env={"PATH": str(tmp_path)}, capture_output=True, text=True
        )

    return run


def test_the_first_that_works(choose: Choose) -> None:
    found = choose(python3=TOO_NEW, python3_12=SHIM, python3_11=THIS)
    assert (found.returncode, found.stdout, found.stderr) == (0, "python3.11\n", "")


def test_what_each_lacks(choose: Choose) -> None:
    found = choose(python3=TOO_NEW, python3_12=SHIM)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.splitlines() == [
        "python3: Python 3.13.0: Trident needs 3.11 or 3.12",
        "python3.12: not found",
        "python3.11: not found",
        "Install Python 3.12 or 3.11 with venv and libpython, or name one: "
        "make PYTHON=/path/to/python3.12",
    ]


def test_only_the_one_that_is_named(choose: Choose) -> None:
    found = choose("python3.12", python3=THIS, python3_12=TOO_NEW)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith("python3.12: Python 3.13.0")


def test_a_machine_that_no_python_makes_fit(choose: Choose) -> None:
    found = choose(python3=NO_MACHINE, python3_11=THIS)
    assert (found.returncode, found.stderr) == (1, "this is Linux on riscv64\n")
