"""JsonRoute: a route whose body is JSON that can be sent on."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.errors import unsupported


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
            return from_json(body)
        except ValueError as error:
            raise HTTPException(400, f"the body is not valid JSON: {error}") from None
