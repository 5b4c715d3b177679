"""Parsing shared by the arguments of `trident bench`."""

from collections.abc import Container, Iterable

from client.bench.errors import BenchError


def named(flag: str, text: str) -> tuple[str, str]:
    """Return the two parts of `NAME=VALUE`.

    Raises:
        BenchError: one of them is missing; names `flag`.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise BenchError(f"{flag}: must be NAME=VALUE (got {text!r})")
    return name, value


def all_named(flag: str, texts: Iterable[str], *, taken: Container[str] = ()) -> dict[str, str]:
    """Return the values by name of `NAME=VALUE` arguments.

    Args:
        taken: names already in use.

    Raises:
        BenchError: an argument has another form, or its name is in use; names `flag`.
    """
    values: dict[str, str] = {}
    for name, value in (named(flag, text) for text in texts):
        if name in values or name in taken:
            raise BenchError(f"{flag}: the name {name} is taken")
        values[name] = value
    return values
