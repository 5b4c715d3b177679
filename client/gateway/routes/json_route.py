"""JsonRoute: a route whose body is JSON that can be sent on."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from client.gateway.errors import ApiError, fault_of, unsupported

# Objects and lists in one body: each takes up to 1 KiB here, and at least a token of a prompt.
MAX_CONTAINERS = 2**16
_LARGE_BYTES = 2**16  # of a body: it takes milliseconds to be read
# All bytes but those that begin an object or a list, or begin or end a string.
_OTHERS = bytes(set(range(256)) - set(b'"[{'))


class JsonRoute(APIRoute):
    """Reads bodies as strictly as what they are sent on to: UTF-8, and no half of a surrogate.

    Large ones are read beside the event loop, which others wait for.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()
        bodies = self.dependant.body_params
        model: Any = bodies[0].field_info.annotation if bodies else None

        async def read(request: Request) -> Response:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise unsupported("content-encoding", "not supported: send the body uncompressed")
            try:
                return await handle(_JsonRequest(request, model))
            except _RefusedError as error:
                raise error.take_fault() from None

        return read


class _JsonRequest(Request):
    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        """`model` is that of the body."""
        super().__init__(request.scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """Return the body.

        Raises:
            HTTPException: it is not valid JSON, or not what the route takes.
        """
        body = await self.body()
        if self._model is None or len(body) < _LARGE_BYTES:
            return _parsed(body)  # which FastAPI validates
        return await asyncio.to_thread(_validated, body, self._model)


class _RefusedError(HTTPException):
    """A body is wrong; FastAPI lets errors of this type pass as they are."""

    def __init__(self, fault: ApiError) -> None:
        super().__init__(fault.status)
        self._fault = fault
        self.args = ()  # Python puts what an error is made of there

    def take_fault(self) -> ApiError:
        """Return what is wrong, once.

        Raised, it would keep this error as its context: each would keep the other, and the body,
        until the next garbage collection.
        """
        fault = self._fault
        del self._fault
        return fault


def _validated(body: bytes, model: type[BaseModel]) -> BaseModel:
    value = _parsed(body)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _RefusedError(fault_of(error.errors())) from None


def _parsed(body: bytes) -> Any:
    body = body.removeprefix(codecs.BOM_UTF8)
    _check_containers(body)
    try:
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
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    # Two quotes with nothing between them make no difference to what is inside a string.
    marks = unescaped.translate(None, _OTHERS).replace(b'""', b"")
    return sum(map(len, marks.split(b'"')[::2]))


def _num_brackets(body: bytes) -> int:
    return body.count(b"{") + body.count(b"[")
