"""JsonRoute: a route whose body is JSON that can be sent on."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.errors import unsupported

# Objects and lists in one body: each takes up to 1 KiB here, and at least a token of a prompt.
MAX_CONTAINERS = 2**16
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # or its beginning, at the end


class JsonRoute(APIRoute):
    """Reads bodies as strictly as what they are sent on to: UTF-8, and no half of a surrogate."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def read(request: Request) -> Response:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise unsupported("content-encoding", "not supported: send the body as it is")
            return await handle(_JsonRequest(request.scope, request.receive))

        return read


class _JsonRequest(Request):
    async def json(self) -> Any:
        """Return the body.

        Raises:
            HTTPException: it is not valid JSON.
        """
        try:
            body = (await self.body()).removeprefix(codecs.BOM_UTF8)
            _check_containers(body)
            return from_json(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None


def _check_containers(body: bytes) -> None:
    """Refuse a body of more objects and lists than a request has, before any is made.

    Raises:
        HTTPException: it has more.
    """
    # Most have not so many brackets even with those in their texts.
    if _num_brackets(body) > MAX_CONTAINERS and (found := num_containers(body)) > MAX_CONTAINERS:
        told = f"at most {MAX_CONTAINERS} are allowed in one"
        raise HTTPException(400, f"the body has {found} objects and lists; {told}")


def num_containers(body: bytes) -> int:
    """Return how many objects and lists JSON has, without making them."""
    return _num_brackets(_STRING.sub(b"", body))


def _num_brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")
