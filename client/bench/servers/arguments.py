"""`NAME=VALUE` arguments of `trident bench`."""

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
            raise BenchError(f"{flag}: the name {name} is taken")
        values[name] = value
    return values
