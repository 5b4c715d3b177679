"""Errors as OpenAI's clients read them: a status and `{"error": {...}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from client.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
)

INVALID = "invalid_request_error"
_CLIENT_CLOSED_REQUEST = 499  # nginx's; the status that the log shows
_RETRY_AFTER_S = 1
# Inputs of the ensemble that clients of this front know by other names.
_INPUTS = {"text_input": "prompt", "input_ids": "prompt"}
_FIELD = re.compile(r"([A-Za-z_][\w.\[\]]*)(?:, [\w., ]+)?: ")


@dataclass
class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        message: for the user.
        type: OpenAI's word for the kind of error.
        param: the field that is wrong, if one is.
        code: a word for programs, if there is one.
        retry_after: seconds after which it may go well.
    """

    status: int
    message: str
    type: str = INVALID
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    def body(self) -> bytes:
        """Return it as JSON."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def response(self) -> Response:
        """Return it as a response."""
        after = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return Response(self.body(), self.status, after, "application/json")


class ClientDisconnectedError(Exception):
    """The client has closed its connection: nobody waits for the answer."""


def from_client(error: TridentClientError, names: Mapping[str, str] = {}) -> ApiError:
    """Return what `error` of a request to the server is for our client.

    Args:
        names: fields of the engine that the client called otherwise, beside the inputs.
    """
    message = str(error)
    if isinstance(error, InvalidRequestError):
        for own, theirs in {**_INPUTS, **names}.items():
            message = re.sub(rf"(^|; |tokens of ){own}\b", rf"\g<1>{theirs}", message)
        field = _FIELD.match(message)
        code = "context_length_exceeded" if "max_model_len" in message else None
        return ApiError(400, message, param=field and field[1], code=code)
    if isinstance(error, QueueFullError):
        return ApiError(
            429, message, "rate_limit_error", code="queue_full", retry_after=_RETRY_AFTER_S
        )
    if isinstance(error, UnavailableError):
        return ApiError(
            503, message, "server_error", code="unavailable", retry_after=_RETRY_AFTER_S
        )
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, message, "timeout_error", code="timeout")
    return ApiError(500, message, "server_error")


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a field, or a value of it, that this gateway does not offer."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported")


HANDLERS: Mapping[Any, Any]


def _answer(request: Request, error: ApiError) -> Response:
    return error.response()


def _gone(request: Request, error: ClientDisconnectedError) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _http(request: Request, error: HTTPException) -> Response:
    response = ApiError(error.status_code, str(error.detail)).response()
    response.headers.update(error.headers or {})
    return response


def _wrong_body(request: Request, error: RequestValidationError) -> Response:
    """Name the first field that is wrong, in OpenAI's way: with status 400."""
    fault = error.errors()[0]
    place = fault["loc"][1:] if fault["loc"][:1] == ("body",) else fault["loc"]
    if fault["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {fault['ctx']['error']}").response()
    if not place:
        return ApiError(400, "the body must be a JSON object").response()
    param = str(place[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])
    unknown = fault["type"] == "extra_forbidden"
    text = "unknown field" if unknown else str(fault["msg"]).removeprefix("Value error, ")
    code = "unknown_parameter" if unknown else None
    return ApiError(400, f"{param}: {text}", param=param, code=code).response()


def _failed(request: Request, error: Exception) -> Response:
    return ApiError(500, "internal error of the gateway", "server_error").response()


HANDLERS = {
    ApiError: _answer,
    ClientDisconnectedError: _gone,
    HTTPException: _http,
    RequestValidationError: _wrong_body,
    Exception: _failed,
}
