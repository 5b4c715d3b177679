"""`NAME=VALUE` arguments of `trident bench`."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterable

from client.bench.errors import BenchError


def all_named(flag: str, texts: Iterable[str], *, taken: Container[str] = ()) -> dict[str, str]:
    """Return the values by name of `NAME=VALUE` arguments.

    Args:
        taken: names already in use.

    Raises:
        BenchError: an argument has another form, or its name is in use; names `flag`.
    """
    values: dict[str, str] = {}
    for text in texts:
        name, _, value = (part.strip() for part in text.partition("="))
        if not (name and value):
            raise BenchError(f"{flag}: must be NAME=VALUE (got {text!r})")
        if name in values or name in taken:
            raise BenchError(f"{flag}: the name {name} is taken; choose another")
        values[name] = value
    return values


def variants(texts: Iterable[str], *, taken: Container[str] = ()) -> dict[str, dict[str, str]]:
    """Return the settings by name of `NAME=SETTING=VALUE ...` arguments; raises as `all_named`."""
    found: dict[str, dict[str, str]] = {}
    for name, words in all_named("--trident", texts, taken=taken).items():
        found[name] = all_named(f"--trident {name}", words.split())
        if "model" in found[name]:
            raise BenchError(
                f"--trident {name}: cannot set the model: all servers have the same one; use "
                "--model"
            )
    return found


def commands(texts: Iterable[str], *, taken: Container[str] = ()) -> dict[str, list[str]]:
    """Return the words by name of `NAME=COMMAND` arguments; raises as `all_named`."""
    found: dict[str, list[str]] = {}
    for name, command in all_named("--peer", texts, taken=taken).items():
        try:
            found[name] = shlex.split(command)
        except ValueError as error:
            raise BenchError(f"--peer {name}: the command cannot be read: {error}") from None
        if "{port}" not in command:
            raise BenchError(f"--peer {name}: the command must contain {{port}}")
    return found
