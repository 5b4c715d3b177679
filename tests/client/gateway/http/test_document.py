"""The OpenAPI document says all that routes may answer, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from client.gateway.app import create_app
from client.gateway.security.access import OPEN_PATHS
from client.gateway.security.tenants import read_tenants
from client.gateway.settings import GatewaySettings

ANYWHERE = {"408", "413", "431", "500"}


def operations(settings: GatewaySettings) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in create_app(settings).openapi()["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


@pytest.mark.parametrize("keys", [(), ("key",)])
def test_every_route_tells_its_answers(keys: tuple[str, ...]) -> None:
    for path, method, operation in operations(GatewaySettings(tenants=read_tenants(keys, None))):
        responses = operation["responses"]
        needs_key = bool(keys) and path not in OPEN_PATHS
        assert responses.keys() >= ANYWHERE, path
        assert ("401" in responses) == needs_key == ("security" in operation)
        assert all(response["content"] for response in responses.values()), path
        if method == "post":
            assert responses.keys() >= {"400", "404", "429", "503"}, path
        assert "422" not in responses


def test_every_schema_is_there() -> None:
    document = create_app(GatewaySettings()).openapi()
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            assert "$defs" not in value
            if "$ref" in value:
                yield value["$ref"]
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                yield from references(each)

    names = {each.removeprefix("#/components/schemas/") for each in references(document)}
    assert names <= schemas.keys()
    # What is sent in any case is required, so that clients may rely on it.
    assert set(schemas["ChatCompletion"]["required"]) >= {"id", "object", "choices", "usage"}
    assert "tool_calls" not in schemas["ChatMessage"]["required"]
