"""Modules that a checkpoint leaves in floating point, as its configuration lists them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def is_ignored(module: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns names `module`, or a module that it is a part of.

    A pattern is a name, or the end or any other run of its parts, with `*` for any characters;
    `re:` begins a regular expression.
    """
    return any(_matches(pattern, module) for pattern in patterns)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return fnmatchcase(f".{module}.", f"*.{pattern}.*")
