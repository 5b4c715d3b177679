"""Checks of user input, and the texts of their errors, shared by several stages."""

import json
import re
from collections.abc import Iterable, Sequence
from reprlib import Repr

import numpy as np
from pydantic import ValidationError

from engine.errors import RequestError


class _Short(Repr):
    """A `repr` that reads only the beginning of a long value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80


_SHORT = _Short()


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `RequestError`, naming `field` and the place, for the first outside the vocabulary."""
    outside: Iterable[tuple[int, int]]
    if isinstance(token_ids, np.ndarray):
        places = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[:1].tolist()
        outside = ((place, token_ids[place]) for place in places)
    else:
        numbered = enumerate(token_ids)
        outside = ((place, each) for place, each in numbered if not 0 <= each < vocab_size)
    for place, token_id in outside:
        where = member(field, place) if isinstance(token_ids, Sequence | np.ndarray) else field
        raise RequestError(
            f"{where}: token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})"
        )


def member(place: str, name: str | int) -> str:
    """Return the place of an element or a member of what is at `place`; "" is the whole.

    `stop[1]`, `messages[0].role`; a name that is no word comes as JSON: `messages[0]["a b"]`.
    """
    if isinstance(name, int):
        return f"{place}[{name}]"
    if not re.fullmatch(r"[\w-]{1,64}", name):
        shown = name if len(name) <= 64 else name[:61] + "..."
        return f"{place}[{json.dumps(shown, ensure_ascii=False)}]"
    return f"{place}.{name}" if place else name


def describe(error: ValidationError) -> str:
    """Return all faults in one line as `field: what is wrong (got value)`, joined by semicolons."""
    return "; ".join(_describe_one(dict(fault)) for fault in error.errors(include_url=False))


def _describe_one(fault: dict[str, object]) -> str:
    location = fault["loc"]
    assert isinstance(location, tuple)
    # pydantic adds [key] to the place of a key that is wrong
    parts = [part for part in location if part != "[key]"]
    field = ""
    for part in parts:
        field = member(field, part)
    field = field or "value"
    if fault["type"] == "extra_forbidden":
        return f"{field}: unknown field"
    message = str(fault["msg"]).removeprefix("Value error, ")
    if not location and fault["type"] == "value_error":
        return message  # of a validator over several fields, which names them itself
    value = _SHORT.repr(fault["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    return f"{field}: {message} (got {shown})"
