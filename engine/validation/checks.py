"""Checks of user input, and the texts of their errors, shared by several stages."""

import json
import re
from collections.abc import Iterable, Sequence
from reprlib import Repr

import numpy as np
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from engine.errors import RequestError, TridentError, UnknownParameterError


class _Short(Repr):
    """A `repr` that reads only the beginning of a long value."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 80


_SHORT = _Short()


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise `RequestError`, with `field` and the index, for the first outside the vocabulary."""
    outside: Iterable[tuple[int, int]]
    if isinstance(token_ids, np.ndarray):
        indices = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))[:1].tolist()
        outside = ((index, token_ids[index]) for index in indices)
    else:
        numbered = enumerate(token_ids)
        outside = ((index, each) for index, each in numbered if not 0 <= each < vocab_size)
    for index, token_id in outside:
        where = member(field, index) if isinstance(token_ids, Sequence | np.ndarray) else field
        raise RequestError(
            f"token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})", param=where
        )


def member(path: str, name: str | int) -> str:
    """Return the path of an element or a member of what is at `path`; "" is the whole.

    `stop[1]`, `messages[0].role`; a name that is no word comes as JSON: `messages[0]["a b"]`.
    """
    if isinstance(name, int):
        return f"{path}[{name}]"
    if not re.fullmatch(r"[\w-]{1,64}", name):
        shown = name if len(name) <= 64 else name[:61] + "..."
        return f"{path}[{json.dumps(shown, ensure_ascii=False)}]"
    return f"{path}.{name}" if path else name


def error_of(faults: ValidationError, kind: type[TridentError]) -> TridentError:
    """Return what pydantic has found in a user's input as an error of ours, of one line.

    It is about the first field; other fields and what is wrong with them follow in its message.

    Args:
        faults: what pydantic has found.
        kind: what the error is, where the first fault is not of a class below that.
    """
    (own, params, message), *others = map(_fault, faults.errors(include_url=False))
    rest = (f"{', '.join(fields)}: {text}" for _, fields, text in others)
    made = own if own is not None and issubclass(own, kind) else kind
    return made("; ".join([message, *rest]), param=params)


def _fault(found: ErrorDetails) -> tuple[type[TridentError] | None, Sequence[str], str]:
    """Return the class of a fault if it has one of its own, its fields, and what is wrong."""
    cause = found.get("ctx", {}).get("error")
    if isinstance(cause, TridentError) and cause.params:
        return type(cause), cause.params, cause.message
    field = ""
    for part in found["loc"]:
        if part != "[key]":  # pydantic adds it to the path of a key that is wrong
            field = member(field, part)
    field = field or "value"
    if found["type"] == "extra_forbidden":
        return UnknownParameterError, [field], "unknown field"
    message = found["msg"].removeprefix("Value error, ")
    value = _SHORT.repr(found["input"])
    shown = value if len(value) <= 80 else value[:77] + "..."
    return None, [field], f"{message} (got {shown})"
