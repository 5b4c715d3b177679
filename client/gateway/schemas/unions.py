"""Key: the field by which the members of a union are distinguished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, BeforeValidator, Discriminator
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Key:
    """A field of JSON objects, whose value names their type.

        Annotated[
            Annotated[A, Tag("<a>")] | Annotated[B, Tag("<b>")],
            KEY.discriminator,
            KEY.only("a", "b"),
        ]

    Tags are in angle brackets: they are no part of the name of a field that is wrong.

    Attributes:
        name: of the field.
        default: the value of an object that has none.
    """

    name: str
    default: Callable[[Mapping[str, Any]], Any] = lambda _: None

    def of(self, value: Any) -> Any:
        """Return the value that an object or a model has; None if it is neither."""
        if not isinstance(value, Mapping):
            return getattr(value, self.name, None)
        return value.get(self.name) or self.default(value)

    @property
    def discriminator(self) -> Discriminator:
        """The discriminator of the members, for pydantic."""
        return Discriminator(lambda value: f"<{self.of(value)}>")

    def only(self, *values: str) -> BeforeValidator:
        """Return a validator that lets nothing pass but objects with one of `values`."""

        def check(value: Any) -> Any:
            if not isinstance(value, Mapping | BaseModel):
                raise PydanticCustomError("value_error", "must be an object")
            if (found := self.of(value)) not in values:
                told = {
                    "name": self.name,
                    "found": repr(found)[:40],
                    "known": ", ".join(values),
                }
                text = "{name} {found} is not supported, only {known}"
                raise PydanticCustomError("unsupported", text, told)
            return value

        return BeforeValidator(check)
