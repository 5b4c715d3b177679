"""The commands and snippets of the READMEs, for the tests that run them."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Example:
    """A command of a `console` block, without its prompt, or a whole `python` block."""

    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0][:70]}"


def pages() -> list[Path]:
    """Return the READMEs, but that of the demo model, which is its model card."""
    listed = subprocess.run(
        ["git", "ls-files", "*README.md"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if "checkpoint" not in name]


def examples() -> list[Example]:
    """Return every command and every Python block of every README."""
    found = []
    for page in pages():
        name = str(page.relative_to(ROOT))
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"```(\w+)\n(.*?)```", text, flags=re.DOTALL):
            if language == "python":
                found.append(Example(name, language, block))
            elif language == "console":
                found += [Example(name, language, command) for command in _commands(block)]
    return found


def _commands(block: str) -> list[str]:
    """Return what follows each prompt, up to where its quotes and backslashes end."""
    commands = []
    lines = iter(block.splitlines())
    for line in lines:
        if not line.startswith("$ "):
            continue  # output
        command = line.removeprefix("$ ")
        while command.endswith("\\") or command.count("'") % 2 or command.count('"') % 2:
            # Inside quotes, the end of a line is part of the word.
            command = command[:-1] if command.endswith("\\") else command + "\n"
            command += next(lines)
        commands.append(command)
    return commands
