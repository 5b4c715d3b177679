"""Values in Python's notation, which several families write where JSON is meant."""

from __future__ import annotations

import ast
import json
import warnings
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}  # some write JSON


def json_of_literal(text: str) -> str | None:
    """Return the JSON of a literal; None if it is none. Nothing is evaluated."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that are none
            parsed = ast.parse(text.strip(), mode="eval")
        written = json.dumps(_value(parsed.body), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    # A pair of surrogates, as JSON escapes it, is one character.
    return written.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_value(key) if key is not None else None for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_value, values), strict=True))
    raise ValueError("is no literal")
