"""Parameters of a request that both the tokenizer stage and the engine stub read."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from engine.errors import RequestError
from engine.json_reader import parse_json, parse_json_fields
from engine.service.tensors import InputReader
from engine.validation.limits import (
    MAX_SAMPLING_CHARACTERS,
    MAX_SAMPLING_FIELDS,
    check_cache_salt,
    check_size,
    check_tenant,
    check_tenant_key,
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
        raise RequestError(f"must fit into 32 bits (got {priority})", param="priority")
    return priority


def parse_sampling_parameters(text: str) -> dict[str, Any]:
    """Return the fields of a `sampling_parameters` JSON object.

    Raises:
        RequestError: it is no valid JSON object, or too large.
    """
    check_size("sampling_parameters", len(text), MAX_SAMPLING_CHARACTERS, "characters")
    fields = parse_json_fields(text, "", partial(RequestError, param="sampling_parameters"))
    check_size("sampling_parameters", len(fields), MAX_SAMPLING_FIELDS, "fields")
    return fields


def decode_parameters(text: str) -> dict[str, Any]:
    """Return the request parameters, which Triton passes on as JSON text.

    Raises:
        RequestError: they are too large, or not valid JSON.
    """
    check_size("request parameters", len(text), MAX_SAMPLING_CHARACTERS, "characters")
    parameters: dict[str, Any] = parse_json(
        text or "{}", "", partial(RequestError, param="request parameters")
    )
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


class Tenant(NamedTuple):
    """The tenant that a request names, and the key that authorises it to name one."""

    name: str = ""
    key: str = ""

    def trusted(self, tenant_key: str | None) -> str:
        """Return the tenant that the request counts as: without a key one and the same.

        Args:
            tenant_key: the server's setting.

        Raises:
            RequestError: the request has another key.
        """
        if not self.key:
            return ""
        if tenant_key is None:
            raise RequestError(
                "the server has no setting tenant_key; leave it out: all requests then share one "
                "tenant",
                param="tenant_key",
            )
        if not hmac.compare_digest(self.key.encode(), tenant_key.encode()):
            raise RequestError("does not match the server's setting tenant_key", param="tenant_key")
        return self.name


def take_tenant(fields: dict[str, Any]) -> Tenant:
    """Remove `tenant` and `tenant_key` from `fields`; they are no sampling parameters.

    Raises:
        RequestError: one is no valid name.
    """
    name, key = fields.pop("tenant", None), fields.pop("tenant_key", None)
    return Tenant(
        "" if name is None else check_tenant(name), "" if key is None else check_tenant_key(key)
    )


class _TenantFields(msgspec.Struct):
    """What of a `sampling_parameters` JSON object is read before the rest of it."""

    tenant: str | None = None
    tenant_key: str | None = None


def queue_tenant(inputs: InputReader, parameters: Mapping[str, Any], tenant_key: str | None) -> str:
    """Return the tenant that a request waits as, before anything else of it is read.

    That of a wrong request, which is refused later, is any.
    """
    if tenant_key is None:
        return ""
    fields = {name: parameters[name] for name in ("tenant", "tenant_key") if name in parameters}
    try:
        text = inputs.string("sampling_parameters") or "{}"
        check_size("sampling_parameters", len(text), MAX_SAMPLING_CHARACTERS, "characters")
        given = msgspec.json.decode(text, type=_TenantFields)
        fields |= {name: value for name, value in msgspec.structs.asdict(given).items() if value}
        return take_tenant(fields).trusted(tenant_key)
    except (ValueError, RecursionError):
        return ""
