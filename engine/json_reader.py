"""Reads JSON of others: of a bounded depth, with one form of errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

# Of objects and lists inside one another, as in the gateway's reader. What works on a document
# takes a few frames of Python's stack for each, of which there are 1,000.
MAX_DEPTH = 200
_TOO_DEEP = f"is nested too deeply: at most {MAX_DEPTH} levels of objects and lists are allowed"


def parse_json(
    content: str | bytes,
    source: str,
    error: Callable[[str], Exception],
    *,
    finite: bool = False,
) -> Any:
    """Return the value that `content` is, in UTF-8.

    Args:
        source: the field or file that it comes from, with which the text of an error begins; "" if
            the caller adds it.
        error: makes what is raised: content that is no JSON, or nested deeper than `MAX_DEPTH`.
        finite: refuse NaN and Infinity, which Python takes for JSON.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant if finite else None)
    except RecursionError:
        raise error(_at(source, _TOO_DEEP)) from None
    except ValueError as problem:
        raise error(_at(source, f"is not valid JSON: {problem}")) from None
    if _is_deep(value):
        raise error(_at(source, _TOO_DEEP))
    return value


def parse_json_fields(text: str, source: str, error: Callable[[str], Exception]) -> dict[str, Any]:
    """Return the object that `text` is; as `parse_json`, several times faster.

    Python's JSON of numbers that are none, or too large, is refused.
    """
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except RecursionError:
        raise error(_at(source, _TOO_DEEP)) from None
    except msgspec.ValidationError as problem:
        raise error(_at(source, f"must be a JSON object: {problem}")) from None
    except (ValueError, UnicodeError) as problem:
        raise error(_at(source, f"is not valid JSON: {problem}")) from None
    if _is_deep(fields):
        raise error(_at(source, _TOO_DEEP))
    return fields


def _is_deep(value: Any) -> bool:
    """Return whether objects and lists nest in `value` deeper than `MAX_DEPTH`."""
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def _at(source: str, problem: str) -> str:
    return f"{source}: {problem}" if source else problem


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
