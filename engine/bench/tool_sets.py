"""Tool sets as agents send them, of any size, made up from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

Schema = dict[str, Any]

_VERBS = ("create", "list", "update", "search", "cancel", "export", "assign", "approve", "merge")
_NOUNS = (
    *("order", "invoice", "customer", "shipment", "ticket", "calendar_event", "pull_request"),
    *("repository", "deployment", "sensor_reading", "mailbox", "contract", "spreadsheet"),
)
_FIELDS = (
    *("id", "name", "status", "amount", "created_after", "owner", "tags", "limit", "notes"),
    *("address", "email", "priority", "ratio", "enabled", "items", "callback_url", "language"),
    *("start", "end", "country_code", "version", "labels", "quantity", "parent", "visibility"),
)
_WORDS = (
    *("the", "of", "to", "a", "in", "is", "that", "only", "if", "when", "returns", "result"),
    *("used", "value", "must", "be", "optional", "number", "text", "filter", "page", "before"),
    *("after", "unless", "given", "matching", "records", "user", "which", "defaults", "never"),
)
_VALUES = (
    *("open", "closed", "pending", "draft", "archived", "high", "low", "normal", "daily"),
    "weekly",
)
_FORMATS = ("date", "date-time", "email", "uuid", "ipv4")
_PATTERNS = ("^[A-Z]{2}$", "^[a-z][a-z0-9-]{2,12}$", "^\\d{4}-\\d{2}$", "^#[0-9a-f]{6}$")
_MAX_DEPTH = 2


class ToolSets:
    """Makes up tools; each seed gives the same ones."""

    def __init__(self, seed: int) -> None:
        """Start with none."""
        self._random = random.Random(seed)
        self._num_tools = 0

    def tools(self, num_characters: int) -> list[Schema]:
        """Return tools, in OpenAI's form, of `num_characters` as JSON or a few more."""
        found, size = [], 2
        while size < num_characters:
            found.append(self._tool())
            size += len(json.dumps(found[-1])) + 2
        return found

    def _tool(self) -> Schema:
        draw = self._random
        self._num_tools += 1
        function = {
            "name": f"{draw.choice(_VERBS)}_{draw.choice(_NOUNS)}_{self._num_tools}",
            "description": self._sentence(12, 60),
            "parameters": self._object(draw.randint(1, 8), 0),
        }
        return {"type": "function", "function": function}

    def _object(self, num_fields: int, depth: int) -> Schema:
        names = self._random.sample(_FIELDS, num_fields)
        fields = {name: self._field(depth) for name in names}
        return _object_of(fields, [name for name in names if self._random.random() < 0.6])

    def _field(self, depth: int) -> Schema:
        described = {"description": self._sentence(3, 20)}
        return {**self._value(depth), **described}

    def _value(self, depth: int) -> Schema:
        draw = self._random
        kinds = ["string", "integer", "number", "boolean", "enum", "format", "pattern", "nullable"]
        match draw.choice(kinds + ["array", "object", "objects"] * (depth < _MAX_DEPTH)):
            case "string":
                return {"type": "string", "maxLength": draw.randint(4, 200)}
            case "integer":
                return {"type": "integer", "minimum": 0, "maximum": 10 ** draw.randint(1, 6)}
            case "number":
                return {"type": "number", "minimum": 0, "maximum": 1}
            case "enum":
                return {"type": "string", "enum": draw.sample(_VALUES, draw.randint(2, 6))}
            case "format":
                return {"type": "string", "format": draw.choice(_FORMATS)}
            case "pattern":
                return {"type": "string", "pattern": draw.choice(_PATTERNS)}
            case "nullable":
                return {"anyOf": [{"type": "integer"}, {"type": "null"}]}
            case "array":
                return {"type": "array", "items": self._value(depth + 1), "maxItems": 4}
            case "object":
                return self._object(draw.randint(1, 5), depth + 1)
            case "objects":
                items = self._object(draw.randint(1, 4), depth + 1)
                return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}
        return {"type": "boolean"}

    def _sentence(self, least: int, most: int) -> str:
        words = self._random.choices(_WORDS, k=self._random.randint(least, most))
        return " ".join(words).capitalize() + "."


def _object_of(fields: Schema, required: list[str]) -> Schema:
    closed = {"required": required, "additionalProperties": False}
    return {"type": "object", "properties": fields, **closed}


def calls_schema(tools: list[Schema]) -> Schema:
    """Return the JSON schema of a call of one of `tools`."""
    functions = [tool["function"] for tool in tools]
    calls = [{"name": {"const": f["name"]}, "arguments": f["parameters"]} for f in functions]
    return {"anyOf": [_object_of(call, [*call]) for call in calls]}


def calls_tag(tools: list[Schema]) -> Schema:
    """Return the structural tag of text with calls of `tools` in it."""
    functions = [tool["function"] for tool in tools]
    structures = [
        {"begin": f"<function={f['name']}>", "schema": f["parameters"], "end": "</function>"}
        for f in functions
    ]
    return {"type": "structural_tag", "structures": structures, "triggers": ["<function="]}
