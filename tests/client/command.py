"""The `trident` command inside the test's own process."""

import sys

import pytest

from client import cli


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command as installed; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["trident", *arguments])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)
