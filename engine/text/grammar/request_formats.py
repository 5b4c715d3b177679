"""Reads the fields by which clients ask for structured output into one `GrammarSpec`.

OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_...` fields, the
`guided_decoding` of Triton's vLLM backend, and TensorRT-LLM's pair of inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from pydantic import ValidationError

from engine.errors import RequestError, UnknownParameterError
from engine.json_reader import parse_json
from engine.text.grammar.spec import (
    MAX_CHARACTERS,
    MAX_WHITESPACE_CHARACTERS,
    GrammarKind,
    GrammarSpec,
)
from engine.validation.checks import error_of, member
from engine.validation.limits import check_size

FIELD = "structured_outputs"

_ANY_OBJECT = '{"type": "object"}'
_KINDS: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
_GUIDE_TYPES: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_BACKEND_FIELD = "guided_decoding"  # of Triton's vLLM backend
_OLDER_WHITESPACE = "guided_whitespace_pattern"
_OLDER = {f"guided_{name}": kind for name, kind in _KINDS.items() if name != "structural_tag"}


def merged(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `fields` with all that ask for structured output as one `structured_outputs`.

    Raises:
        RequestError: one of them is wrong, or two ask for different things. (Some clients send
            the form of older versions of vLLM beside that of newer ones.)
    """
    rest = dict(fields)
    asked: dict[str, GrammarSpec] = {}
    for name, kind in _OLDER.items():
        if (value := rest.pop(name, None)) is not None:
            asked[name] = _spec(kind, value, name)
    if (value := rest.pop("response_format", None)) is not None:
        spec = _response_format(value)
        asked |= {} if spec is None else {"response_format": spec}
    if (value := rest.pop(FIELD, None)) is not None:
        asked[FIELD] = parse_structured_outputs(value)
    if (value := rest.pop(_BACKEND_FIELD, None)) is not None:
        given = {k: v for k, v in _object(value, _BACKEND_FIELD).items() if k != "backend"}
        asked[_BACKEND_FIELD] = parse_structured_outputs(given, _BACKEND_FIELD)
    if isinstance(rest.get(GUIDE), GrammarSpec):
        asked[GUIDE] = rest.pop(GUIDE)
    if (value := rest.pop(_OLDER_WHITESPACE, None)) is not None:
        asked = {name: _with_whitespace(spec, value) for name, spec in asked.items()}
        if not asked:
            raise RequestError("needs guided_json, or response_format", param=_OLDER_WHITESPACE)
    if len({spec.key for spec in asked.values()}) > 1:
        raise RequestError(f"give only one of them (got {len(asked)})", param=[*asked])
    if asked:
        rest[FIELD] = next(iter(asked.values()))
    return rest


def parse_structured_outputs(value: Any, field: str = FIELD) -> GrammarSpec:
    """Return what `structured_outputs` asks for: an object with one of vLLM's keys.

    Beside it, `strict`, `whitespace_pattern` and `begin_after` as in `GrammarSpec`, and
    `disable_any_whitespace`. A spec itself passes through.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(value, GrammarSpec):
        return value
    fields = {k: v for k, v in _object(value, field).items() if v is not None}
    if "kind" in fields:  # dumped by another stage
        return _validated(fields, f"{field}.text")
    if fields.get("json_object") is False:
        del fields["json_object"]
    names = ("strict", "begin_after", "whitespace_pattern")
    options = {name: fields.pop(name) for name in names if name in fields}
    is_compact = fields.pop("disable_any_whitespace", False)
    _refuse_others(fields, {*_KINDS, "json_object"}, field)
    if len(fields) != 1:
        given = [f"{field}.{name}" for name in sorted(fields)] or field
        known = ", ".join(["json_object", *_KINDS])
        raise RequestError(f"give exactly one of {known}", param=given)
    [(name, content)] = fields.items()
    options |= _compact(is_compact, options, field)
    if "whitespace_pattern" in options and name not in ("json", "json_object", "structural_tag"):
        given = "disable_any_whitespace" if is_compact else "whitespace_pattern"
        raise RequestError(
            "is supported with json, json_object and structural_tag only", param=f"{field}.{given}"
        )
    if name == "json_object":
        if content is not True:
            raise RequestError("must be true or false", param=f"{field}.json_object")
        return _spec("json_schema", _ANY_OBJECT, f"{field}.json_object", **options)
    return _spec(_KINDS[name], content, f"{field}.{name}", **options)


def _compact(value: Any, options: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the option that `disable_any_whitespace` with this `value` stands for."""
    name = f"{field}.disable_any_whitespace"
    if not isinstance(value, bool):
        raise RequestError("must be true or false", param=name)
    if value and "whitespace_pattern" in options:
        raise RequestError(
            "cannot be given together with whitespace_pattern; leave one out", param=name
        )
    return {"whitespace_pattern": ""} if value else {}


def _with_whitespace(spec: GrammarSpec, pattern: Any) -> GrammarSpec:
    if spec.kind not in ("json_schema", "structural_tag"):
        raise RequestError(
            f"is supported for JSON only, not for {spec.field}", param=_OLDER_WHITESPACE
        )
    if not isinstance(pattern, str):
        raise RequestError("must be a string", param=_OLDER_WHITESPACE)
    check_size(_OLDER_WHITESPACE, len(pattern), MAX_WHITESPACE_CHARACTERS, "characters")
    return spec.model_copy(update={"whitespace_pattern": pattern})


def guided_decoding(guide_type: str, guide: str) -> GrammarSpec | None:
    """Return what TensorRT-LLM's inputs ask for, both "" if absent; `merged` takes it as GUIDE.

    Raises:
        RequestError: the type is unknown, or the guide does not go with it.
    """
    if guide_type == "json":
        if guide:
            raise RequestError(
                f"must be left out with {GUIDE_TYPE} json; to give a schema, use {GUIDE_TYPE} "
                "json_schema",
                param=GUIDE,
            )
        return _spec("json_schema", _ANY_OBJECT, GUIDE_TYPE)
    if not guide_type and not guide:
        return None
    if not guide_type:
        raise RequestError(f"needs {GUIDE_TYPE}", param=GUIDE)
    if guide_type not in _GUIDE_TYPES:
        raise RequestError(f"must be json, {', '.join(_GUIDE_TYPES)}", param=GUIDE_TYPE)
    if not guide:
        raise RequestError("is missing", param=GUIDE)
    return _spec(_GUIDE_TYPES[guide_type], guide, GUIDE)


def _response_format(value: Any) -> GrammarSpec | None:
    fields = _object(value, "response_format")
    match fields.get("type"):
        case "text":
            _refuse_others(fields, {"type"}, "response_format")
            return None
        case "json_object":
            _refuse_others(fields, {"type"}, "response_format")
            return _spec("json_schema", _ANY_OBJECT, "response_format")
        case "json_schema":
            _refuse_others(fields, {"type", "json_schema"}, "response_format")
            return _named_schema(fields.get("json_schema"), "response_format.json_schema")
        case "structural_tag":
            return _spec("structural_tag", fields, "response_format")
    raise RequestError(
        "must be text, json_object, json_schema or structural_tag", param="response_format.type"
    )


def _named_schema(value: Any, field: str) -> GrammarSpec:
    fields = _object(value, field)
    _refuse_others(fields, {"name", "description", "schema", "strict"}, field)
    for name in ("name", "description"):
        if not isinstance(fields.get(name), str | None):
            raise RequestError("must be a string", param=f"{field}.{name}")
    if "schema" not in fields:
        raise RequestError("is missing", param=f"{field}.schema")
    strict = fields.get("strict")
    strict = True if strict is None else strict
    return _spec("json_schema", fields["schema"], f"{field}.schema", strict=strict)


def _refuse_others(fields: Mapping[str, Any], known: set[str], field: str) -> None:
    unknown = {name for name, value in fields.items() if value is not None} - known
    if unknown:
        raise UnknownParameterError("unknown field", param=member(field, min(unknown)))


def _spec(kind: GrammarKind, content: Any, field: str, **options: Any) -> GrammarSpec:
    if kind == "choice":
        if isinstance(content, str):
            content = parse_json(content, "", partial(RequestError, param=field))
        if not isinstance(content, (list, tuple)) or not all(isinstance(x, str) for x in content):
            raise RequestError("must be a list of strings", param=field)
        text = json.dumps(list(content), ensure_ascii=False)
    elif isinstance(content, str):
        text = content
    elif kind in ("json_schema", "structural_tag") and isinstance(content, (Mapping, bool)):
        text = _dumped(content, field)
    else:
        wanted = "an object or its JSON text" if kind in ("json_schema", "structural_tag") else ""
        raise RequestError(f"must be {wanted or 'a string'}", param=field)
    check_size(field, len(text), MAX_CHARACTERS[kind], "characters")
    return _validated({"kind": kind, "text": text, "field": field, **options}, field)


def _validated(fields: Mapping[str, Any], field: str) -> GrammarSpec:
    try:
        return GrammarSpec.model_validate(fields)
    except ValidationError as error:
        fault = error_of(error, RequestError)
        [param] = fault.params
        beside = f"{field.rpartition('.')[0]}.{param}"  # the options are beside what they are for
        raise fault.reworded(fault.message, param=field if param == "text" else beside) from None


def _object(value: Any, field: str) -> dict[str, Any]:
    """Return `value`, an object or its JSON text: request parameters are scalars."""
    if isinstance(value, str):
        value = parse_json(value, "", partial(RequestError, param=field))
    if not isinstance(value, Mapping):
        raise RequestError("must be an object", param=field)
    return {str(name): each for name, each in value.items()}


def _dumped(content: Any, field: str) -> str:
    try:
        return json.dumps(content, ensure_ascii=False, allow_nan=False)
    except (RecursionError, ValueError, TypeError) as error:
        raise RequestError(f"cannot be written as JSON: {error}", param=field) from None
