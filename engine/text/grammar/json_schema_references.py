"""What references inside a JSON schema lead to, and what is done because of that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote


def resolved(root: Any, ref: str) -> Any | None:
    """Return the schema that a JSON pointer into `root` names; None if it is no such pointer."""
    if not ref.startswith("#") or (ref != "#" and not ref.startswith("#/")):
        return None
    value = root
    for part in ref[2:].split("/") if ref != "#" else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value if isinstance(value, (Mapping, bool)) else None


def drop_unreachable(root: Any, schemas: Sequence[dict[str, Any]]) -> None:
    """Drop the references of `schemas`, which are all in `root`, to what is not there."""
    bases = {str(schema["$id"]) for schema in schemas if "$id" in schema}
    anchors = {f"#{schema['$anchor']}" for schema in schemas if "$anchor" in schema}
    for schema in schemas:
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            continue
        is_there = resolved(root, unquote(ref)) is not None
        if not is_there and ref not in anchors and ref.partition("#")[0] not in bases:
            del schema["$ref"]


def allow_any_of_exclusive(root: Any, schemas: Iterable[dict[str, Any]]) -> None:
    """Write "anyOf" for "oneOf" where a tag, as pydantic's unions have it, tells objects apart.

    llguidance does not look for it behind references.
    """
    for schema in schemas:
        alternatives = schema.get("oneOf")
        if "anyOf" in schema or not isinstance(alternatives, list) or not alternatives:
            continue
        tags = [_tags(root, each) for each in alternatives]
        if any(_are_disjoint([each.get(name, set()) for each in tags]) for name in tags[0]):
            schema["anyOf"] = schema.pop("oneOf")


def _tags(root: Any, schema: Any) -> dict[str, set[str]]:
    """Return the texts that members may be which every instance has, all of them objects."""
    if isinstance(schema, Mapping) and isinstance(ref := schema.get("$ref"), str):
        schema = resolved(root, ref)
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return {}
    tags = {}
    for name, inner in schema.get("properties", {}).items():
        if name in schema.get("required", ()) and isinstance(inner, Mapping):
            values = inner.get("enum", [inner.get("const")])
            if isinstance(values, list) and all(isinstance(each, str) for each in values):
                tags[name] = set(values)
    return tags


def _are_disjoint(values: Sequence[set[str]]) -> bool:
    return all(values) and sum(map(len, values)) == len(set().union(*values))
