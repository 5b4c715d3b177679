"""The arguments of a function one by one, for forms that do not write them as one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

ANNOTATIONS = {
    *("title", "description", "default", "example", "examples", "deprecated"),
    *("readOnly", "writeOnly", "$comment", "$schema", "$id", "id", "$anchor"),
}
DEFINITIONS = {"$defs", "definitions"}
_ENFORCED = {"type", "properties", "required", "additionalProperties", "$ref"}
_WHOLE = "all-parameters"  # a definition


class Parameter(NamedTuple):
    """An argument's JSON schema, with the definitions for it, and whether it must be given."""

    schema: Any
    is_required: bool


def parameters_of(schema: Mapping[str, Any], *, strict: bool) -> dict[str, Parameter]:
    """Return what arguments there are by name, the required ones first.

    Those of alternatives are all there, as each is written without regard to the others.

    Args:
        schema: of the object of all arguments.
        strict: refuse what would not be enforced.

    Raises:
        ValueError: because of that; the text names the keyword.
    """
    moved, definitions = _apart(schema)
    found: dict[str, list[Any]] = {}
    required: dict[str, Any] = {}
    for part, is_certain in _parts({**moved, **definitions}, strict=strict):
        given = part.get("properties")
        for name, inner in given.items() if isinstance(given, Mapping) else ():
            found.setdefault(name, []).append(inner)
        if is_certain:
            others = part.get("additionalProperties", True)
            required |= {str(name): others for name in listed(part, "required")}
    for name, inner in required.items():
        found.setdefault(name, [inner])
    # A strict schema has no alternatives, but references with something beside them.
    combined = "allOf" if strict else "anyOf"
    parameters = {}
    for name in sorted(found, key=lambda name: name not in required):
        inner = found[name][0] if len(found[name]) == 1 else {combined: found[name]}
        inner = {**inner, **definitions} if isinstance(inner, Mapping) else inner
        parameters[name] = Parameter(inner, name in required)
    return parameters


def listed(schema: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list of a keyword, empty if it has none."""
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _apart(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Return a schema whose parts can stand alone, with the definitions that they need."""
    is_referred = any(map(_is_outside, _references(schema)))
    try:
        moved = _moved(schema) if is_referred else schema
    except RecursionError:  # the server refuses it
        moved = schema
    definitions: dict[str, Mapping[str, Any]] = {
        name: given for name in DEFINITIONS if isinstance(given := moved.get(name), Mapping)
    }
    if is_referred:
        whole = {name: value for name, value in moved.items() if name not in DEFINITIONS}
        definitions["$defs"] = {**definitions.get("$defs", {}), _WHOLE: whole}
    return moved, definitions


def _moved(value: Any) -> Any:
    """Return a value where what refers to the whole schema refers to a definition."""
    if isinstance(value, Mapping):
        inner = {name: _moved(each) for name, each in value.items()}
        if _is_outside(ref := value.get("$ref")):
            inner["$ref"] = f"#/$defs/{_WHOLE}{str(ref)[1:]}"
        return inner
    return [_moved(each) for each in value] if isinstance(value, list) else value


def _references(schema: Mapping[str, Any]) -> Iterator[Any]:
    waiting: list[Any] = [schema]
    for value in waiting:
        if isinstance(value, Mapping):
            yield value.get("$ref")
        if isinstance(value, (Mapping, list)):
            waiting += value.values() if isinstance(value, Mapping) else value


def _is_outside(ref: Any) -> bool:
    """Whether it is a pointer to something else than a definition."""
    if not isinstance(ref, str) or ref.split("/")[0] != "#":
        return False
    return not any(ref.startswith(f"#/{name}/") for name in DEFINITIONS)


def _parts(root: Mapping[str, Any], *, strict: bool) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Yield `root` and what it consists of, and whether that holds for all arguments."""
    waiting: list[tuple[Any, bool]] = [(root, True)]
    followed = set()
    for part, is_certain in waiting:
        if not isinstance(part, Mapping):
            continue
        yield part, is_certain
        ref = part.get("$ref")
        target = _target(root, ref) if isinstance(ref, str) else None
        known = _ENFORCED | ANNOTATIONS | DEFINITIONS
        for name in part if strict else ():
            if (name not in known and not name.startswith("x-")) or (name == "$ref" and not target):
                raise ValueError(f'keyword "{name}" is not enforced for tool calls of this model')
        if target is not None and ref not in followed:
            followed.add(ref)
            waiting.append((target, is_certain))
        waiting += [(each, is_certain) for each in listed(part, "allOf")]
        waiting += [(each, False) for name in ("anyOf", "oneOf") for each in listed(part, name)]


def _target(root: Mapping[str, Any], ref: str) -> Any:
    """Return what a JSON pointer names; None if it is no pointer into `root`."""
    first, *names = ref.split("/")
    target: Any = root if first == "#" else None
    for name in names:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping):
            target = target.get(name)
        else:
            target = target[int(name)] if _has(target, name) else None
    return target


def _has(value: Any, index: str) -> bool:
    return isinstance(value, list) and index.isdecimal() and int(index) < len(value)
