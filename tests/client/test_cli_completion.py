"""Shell completion of `trident`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client import cli
from tests.client.test_imports import WITHOUT_ENGINE

ROOT = Path(cli.__file__).parents[1]


def _trident(*arguments: str, **variables: str) -> str:
    code = f"{WITHOUT_ENGINE}\nfrom client.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False
    ).stdout


def _completed(line: str) -> list[str]:
    """What bash would offer for the last word of `line`."""
    words = line.split(" ")
    return _trident(
        _TRIDENT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)
    ).split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_prints_a_script(shell: str) -> None:
    script = _trident("--show-completion", shell)
    assert "_TRIDENT_COMPLETE" in script
    assert "trident" in script


def test_the_script_is_valid_bash() -> None:
    checked = subprocess.run(
        ["bash", "-n"],
        input=_trident("--show-completion", "bash"),
        text=True,
        capture_output=True,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_offers_commands_and_options() -> None:
    assert _completed("trident r") == ["run"]
    assert _completed("trident ") == [
        *("serve", "gateway", "demo", "run", "chat", "health", "bench"),
    ]
    assert _completed("trident run --see") == ["--seed"]
