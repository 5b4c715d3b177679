"""Typed reading of an untrusted JSON object, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from engine.errors import CheckpointError, UnsupportedError
from engine.json_reader import parse_json

T = TypeVar("T")

_REQUIRED: Any = object()
_MOST = 2**31 - 1  # of integers: what sizes and positions are on a device


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"not found in {path.parent}", param=path.name) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", param=str(path)) from None
    return parse_json_object(content, str(path))


def parse_json_object(content: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object that `content` is, in UTF-8.

    Raises:
        CheckpointError: it is none; the text begins with `name`, its `param`.
    """
    found = parse_json(content, "", partial(CheckpointError, param=name))
    if not isinstance(found, dict):
        raise CheckpointError("must hold one JSON object", param=name)
    return found


class Fields:
    """The fields of one JSON object; every reader raises `CheckpointError` naming the field.

    A reader without `default` requires the field. A field that is null counts as absent, which is
    what Hugging Face configurations mean by it.
    """

    def __init__(
        self, values: Mapping[str, Any], *, name: str, called: Mapping[str, str] | None = None
    ) -> None:
        """Read `values`, in which a field has the name that `called` has for it, if it has one."""
        self._values = values
        self._name = name
        self._called = called or {}

    def over(self, defaults: Mapping[str, Any]) -> Fields:
        """Return these fields, and `defaults` where one is absent."""
        return Fields({**defaults, **self._values}, name=self._name, called=self._called)

    def under(self, fields: Fields) -> Fields:
        """Return `fields`, and these where one is absent there."""
        return fields.over(self._values)

    def without(self, field: str) -> Fields:
        """Return the other fields."""
        others = {name: value for name, value in self._values.items() if name != field}
        return Fields(others, name=self._name, called=self._called)

    def calling(self, **called: str) -> Fields:
        """Return the same fields, for an object that has other names for the usual ones."""
        return Fields(self._values, name=self._name, called=called)

    def __contains__(self, field: str) -> bool:
        return self.raw(field) is not None

    def is_null(self, field: str) -> bool:
        """Return whether the field is present and null."""
        return self._called.get(field, field) in self._values and self.raw(field) is None

    def names(self) -> list[str]:
        return list(self._values)

    def raw(self, field: str) -> Any:
        """Return the unchecked value, None where it is absent."""
        return self._values.get(self._called.get(field, field))

    def error(self, field: str, problem: str) -> CheckpointError:
        return CheckpointError(problem, param=self.path_of(field))

    def unsupported(self, field: str, problem: str) -> UnsupportedError:
        return UnsupportedError(problem, param=self.path_of(field))

    def path_of(self, field: str) -> str:
        """Return the file and the field in it, as the `param` of errors has them."""
        return f"{self._name}: {self._called.get(field, field)}"

    def integer(
        self,
        field: str,
        *,
        default: T | int = _REQUIRED,
        minimum: int = 1,
        maximum: int = _MOST,
    ) -> T | int:
        value = self._get(field, default)
        if value is default:
            return value
        # JSON writers of other languages may write 32.0 for a count; True is an int to Python.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(field, value, f"an integer of at least {minimum}")
        if value > maximum:
            raise self._wrong(field, value, f"an integer of at most {maximum}")
        return value

    def number(
        self, field: str, *, default: T | float = _REQUIRED, or_zero: bool = False
    ) -> T | float:
        value = self._get(field, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(field, value, "a number above 0")
        if not (value > 0 or (or_zero and value == 0)):
            raise self._wrong(field, value, "a number above 0")
        if not math.isfinite(value):
            raise self._wrong(field, value, "a finite number")
        return value

    def boolean(self, field: str, *, default: bool) -> bool:
        value = self._get(field, default)
        if not isinstance(value, bool):
            raise self._wrong(field, value, "true or false")
        return value

    def text(self, field: str, *, default: str = _REQUIRED) -> str:
        value = self._get(field, default)
        if not isinstance(value, str):
            raise self._wrong(field, value, "a string")
        return value

    def texts(self, field: str) -> list[str] | None:
        """Return a list of strings, None where it is absent."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(field, value, "a list of strings")
        return value

    def integers(self, field: str) -> tuple[int, ...]:
        """Return one integer or a list of them as a tuple, empty where it is absent."""
        value = self.raw(field)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._wrong(field, value, "an integer or a list of integers")
        return tuple(items)

    def numbers(self, field: str) -> tuple[float, ...]:
        """Return a list of positive numbers, which must be there, as a tuple."""
        value = self._get(field, _REQUIRED)
        is_list = isinstance(value, list) and bool(value)
        if not is_list or not all(
            type(item) in (int, float) and 0 < item < math.inf for item in value
        ):
            raise self._wrong(field, value, "a list of numbers above 0")
        return tuple(map(float, value))

    def child(self, field: str) -> Fields | None:
        """Return a nested object, None where it is absent or empty."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(field, value, "an object")
        return Fields(value, name=f"{self._name}: {field}") if value else None

    def _get(self, field: str, default: Any) -> Any:
        value = self.raw(field)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(field, "is missing")
        return default

    def _wrong(self, field: str, value: Any, expected: str) -> CheckpointError:
        shown = json.dumps(value, default=repr)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return self.error(field, f"must be {expected} (got {shown})")
