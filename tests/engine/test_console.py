"""Boxes in ASCII where the locale is C; the texts in them stay what they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from rich.panel import Panel
from engine.console import Console
Console().print(Panel("ü"))
"""


@pytest.mark.parametrize(
    ("variables", "is_ascii"),
    [
        ({"LC_ALL": "C"}, True),
        ({"LC_ALL": "POSIX", "LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C"}, True),  # Python sets LC_CTYPE itself
        ({"LANG": "C", "LC_ALL": "C.UTF-8"}, False),
        ({"LANG": "C.UTF-8"}, False),
        ({}, False),
        ({"LANG": "C.UTF-8", "PYTHONIOENCODING": "latin-1"}, True),
    ],
)
def test_console_in_the_locale_c_draws_boxes_in_ascii(
    variables: dict[str, str], is_ascii: bool
) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHON"))}
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, **variables},
        capture_output=True,
        cwd=ROOT,
        check=True,
    ).stdout.decode(variables.get("PYTHONIOENCODING", "utf-8"))
    assert "ü" in shown
    assert shown.replace("ü", "").isascii() == is_ascii
