"""Parameters of a request that both the tokenizer stage and the engine stub read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import RequestError
from engine.json_reader import parse_json, parse_json_fields
from engine.service.tensors import InputReader
from engine.validation.limits import (
    MAX_SAMPLING_CHARACTERS,
    MAX_SAMPLING_FIELDS,
    check_cache_salt,
    check_size,
    check_tenant,
)

# Request parameters that Triton and its clients set for themselves.
_TRITON_PARAMETERS = frozenset(
    {
        "id",  # of the request, from HTTP's generate: see `engine.service.triton.request_id`
        "triton_enable_empty_final_response",
        "binary_data_output",
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
    }
)


def read_priority(inputs: InputReader) -> int:
    """Return the priority of a request, 0 by default.

    Raises:
        RequestError: it does not fit into 32 bits.
    """
    priority = inputs.integer("priority") or 0
    if not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority: must fit into 32 bits (got {priority})")
    return priority


def parse_sampling_parameters(text: str) -> dict[str, Any]:
    """Return the fields of a `sampling_parameters` JSON object.

    Raises:
        RequestError: it is no valid JSON object, or too large.
    """
    check_size("sampling_parameters", len(text), MAX_SAMPLING_CHARACTERS, "characters")
    fields = parse_json_fields(text, "sampling_parameters", RequestError)
    check_size("sampling_parameters", len(fields), MAX_SAMPLING_FIELDS, "fields")
    return fields


def decode_parameters(text: str) -> dict[str, Any]:
    """Return the request parameters, which Triton passes on as JSON text.

    Raises:
        RequestError: they are too large, or not valid JSON.
    """
    check_size("request parameters", len(text), MAX_SAMPLING_CHARACTERS, "characters")
    parameters: dict[str, Any] = parse_json(text or "{}", "request parameters", RequestError)
    check_size("request parameters", len(parameters), MAX_SAMPLING_FIELDS, "fields")
    return parameters


def client_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request parameters that the client itself set."""
    return {name: value for name, value in parameters.items() if name not in _TRITON_PARAMETERS}


def take_cache_salt(fields: dict[str, Any]) -> str:
    """Remove `cache_salt` from `fields`, where it is beside the sampling parameters; "" if absent.

    Raises:
        RequestError: it is no valid salt.
    """
    salt = fields.pop("cache_salt", None)
    return "" if salt is None else check_cache_salt(salt)


def take_tenant(fields: dict[str, Any]) -> str:
    """Remove `tenant` from `fields`, where it is beside the sampling parameters; "" if absent.

    Raises:
        RequestError: it is no valid name.
    """
    tenant = fields.pop("tenant", None)
    return "" if tenant is None else check_tenant(tenant)
