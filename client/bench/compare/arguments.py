"""What the arguments of `trident bench compare` have in common."""

from client.bench.errors import BenchError


def named(flag: str, text: str) -> tuple[str, str]:
    """Return the two parts of `NAME=VALUE`.

    Raises:
        BenchError: naming `flag`, if one of them is missing.
    """
    name, _, value = (part.strip() for part in text.partition("="))
    if not (name and value):
        raise BenchError(f"{flag}: must be NAME=VALUE (got {text!r})")
    return name, value
