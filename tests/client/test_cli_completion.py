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


def _script(shell: str) -> str:
    """Return the script for a shell; users get that of the one that they call `trident` from."""
    return _trident("--show-completion", shell, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")


@pytest.mark.parametrize(
    ("shell", "registers"),
    [
        ("bash", "complete -o default -F _trident_completion trident"),
        ("zsh", "compdef _trident_completion trident"),
        ("fish", "complete --command trident"),
    ],
)
def test_prints_a_script(shell: str, registers: str) -> None:
    script = _script(shell)
    assert f"_TRIDENT_COMPLETE=complete_{shell}" in script
    assert registers in script


def test_the_script_is_valid_bash() -> None:
    checked = subprocess.run(
        ["bash", "-n"],
        input=_script("bash"),
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
