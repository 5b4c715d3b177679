"""Limits on the fields of requests: what the engine would refuse is refused before it is sent.

The numbers are those of `engine.validation.limits` and of `engine.text.grammar.spec`, as far as
they are there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

MAX_MESSAGES = 4096
MAX_ITEMS = 4 * MAX_MESSAGES  # of a response's input: several make one message
MAX_TOOLS = 1024
MAX_SAMPLING_CHARACTERS = 2**19
MAX_CHAT_CHARACTERS = 2**21
MAX_LOGPROBS_AT_ONCE = 2**18  # in one answer that is not streamed

MAX_WORDS = 256
MAX_WORD_CHARACTERS = 1024
MAX_WORDS_CHARACTERS = 8192
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_DRY_BREAKERS = 32
MAX_DRY_BREAKER_CHARACTERS = 40
MAX_LOGITS_PROCESSORS = 8
MAX_CACHE_SALT_CHARACTERS = 1024
MAX_REGEX_CHARACTERS = 2**15
MAX_GRAMMAR_CHARACTERS = 2**17
MAX_SCHEMA_CHARACTERS = 2**19

# Of what has no effect here.
MAX_METADATA = 1024

_JSON_NAMES = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}


@dataclass(frozen=True)
class AtMost:
    """Refuses a list, an object or a string that is too long, before anything of it is read.

    Attributes:
        limit: how many of
        unit: elements; of strings `characters`.
    """

    limit: int
    unit: str

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return the schema with the check before it."""
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema with its limit."""
        made = handler(schema)
        if (name := _JSON_NAMES.get(made.get("type", ""))) is not None:
            made[name] = self.limit
        return made

    def _check(self, value: Any) -> Any:
        kinds = str if self.unit == "characters" else (list, dict)
        if isinstance(value, kinds):
            _refuse_above(self.limit, len(value), self.unit)
        return value


def words(most: int, most_characters: int, most_in_all: int | None = None) -> BeforeValidator:
    """Return the check of strings: how many, how long each of them, and all together."""

    def check(value: Any) -> Any:
        given = [value] if isinstance(value, str) else value
        if not isinstance(given, list):
            return value
        _refuse_above(most, len(given), "strings")
        lengths = [len(each) if isinstance(each, str) else 0 for each in given]
        for index, length in enumerate(lengths):
            if length > most_characters:
                raise _fault(index if given is value else None, most_characters, length)
        if most_in_all is not None:
            _refuse_above(most_in_all, sum(lengths), "characters in all")
        return value

    return BeforeValidator(check)


def _fault(index: int | None, limit: int, found: int) -> ValidationError:
    """Return the fault of a string that is too long; None: it is alone."""
    kind = PydanticCustomError(
        "value_error", "{text}", {"text": _above(limit, found, "characters")}
    )
    where = () if index is None else (index,)
    fault = InitErrorDetails(type=kind, loc=where, input=None)
    return ValidationError.from_exception_data("words", [fault])


def _above(limit: int, found: int, unit: str) -> str:
    return f"must have at most {limit} {unit} (got {found})"


def _refuse_above(limit: int, found: int, unit: str) -> None:
    if found > limit:
        raise ValueError(_above(limit, found, unit))
