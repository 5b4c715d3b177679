"""Errors: a status, and a body in the form of the API that was asked, OpenAI's or Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from msgspec import UNSET
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from client.errors import (
    PLACE,
    InvalidRequestError,
    QueueFullError,
    RequestTimeoutError,
    TridentClientError,
    UnavailableError,
    UnsupportedRequestError,
)
from client.gateway.schemas.errors import (
    AnthropicErrorBody,
    AnthropicErrorCode,
    AnthropicErrorDetail,
    ErrorBody,
    ErrorDetail,
)

INVALID = "invalid_request_error"
_CLIENT_CLOSED_REQUEST = 499  # nginx's; the status that the log shows
_RETRY_AFTER_S = 1
# Inputs of the ensemble that clients of this front know by other names.
_INPUTS = {"text_input": "prompt", "input_ids": "prompt"}
_FIELD = re.compile(rf"({PLACE})(?:, {PLACE})*: ")
# Of pydantic's types of errors, with our own.
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "thread_unsupported_request": "thread_unsupported_request",
    "unsupported": "unsupported",
}
_UNKNOWN_MODEL = "unknown model"  # Triton's words
_PREFIX = "/v1"  # that clients forget in the address
_ANTHROPIC_PATH = f"{_PREFIX}/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


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

    def body(self, scope: Scope) -> bytes:
        """Return it as JSON, in the form of the API that the request of `scope` asks."""
        if is_anthropic(scope["path"]):
            kind = "api_error" if self.status >= 500 else INVALID
            code = UNSET if self.code is None else AnthropicErrorCode(self.code)
            error = AnthropicErrorDetail(
                _ANTHROPIC_TYPES.get(self.status, kind), self.message, code
            )
            return msgspec.json.encode(AnthropicErrorBody(error, scope["state"]["request_id"]))
        detail = ErrorDetail(self.message, self.type, self.param, self.code)
        return msgspec.json.encode(ErrorBody(detail))

    def response(self, scope: Scope) -> Response:
        """Return it as the response to the request of `scope`."""
        after = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return Response(self.body(scope), self.status, after, "application/json")


class ClientDisconnectedError(Exception):
    """The client has closed its connection: nobody waits for the answer."""


def is_anthropic(path: str) -> bool:
    """Whether a request for `path` asks Anthropic's API."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def from_client(error: TridentClientError, names: Mapping[str, str] = {}) -> ApiError:
    """Return what `error` of a request to the server is for our client.

    Args:
        names: by patterns of the engine's fields, what the client called them, beside the inputs.
    """
    message = str(error)
    if _UNKNOWN_MODEL in message:  # no fault of a client
        text = f"{message}; see --served-model-name of the gateway"
        return ApiError(503, text, "server_error", code="unavailable")
    if isinstance(error, InvalidRequestError):
        for own, theirs in {**_INPUTS, **names}.items():
            message = re.sub(rf"(^|; |tokens of ){own}(?![\w/])", rf"\g<1>{theirs}", message)
        field = _FIELD.match(message)
        return ApiError(400, message, param=field and field[1], code=_code(error, message))
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


def _code(error: InvalidRequestError, message: str) -> str | None:
    """Return the word for programs: the same as of what this gateway finds itself."""
    if "max_model_len" in message:
        return "context_length_exceeded"
    if message.endswith(": unknown field"):
        return "unknown_parameter"
    return "unsupported" if isinstance(error, UnsupportedRequestError) else None


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a field, or a value of it, that this gateway does not offer."""
    return ApiError(400, f"{param}: {message}", param=param, code="unsupported")


HANDLERS: Mapping[Any, Any]


def _answer(request: Request, error: ApiError) -> Response:
    return error.response(request.scope)


def _gone(request: Request, error: ClientDisconnectedError) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _http(request: Request, error: HTTPException) -> Response:
    text = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        text = f"there is no {request.url.path[:128]}{_instead(request)}"
    response = ApiError(error.status_code, text).response(request.scope)
    response.headers.update(error.headers or {})
    return response


def _instead(request: Request) -> str:
    scope = {**request.scope, "path": f"{_PREFIX}{request.url.path}"}
    is_route = any(each.matches(scope)[0] != Match.NONE for each in request.app.routes)
    return f"; did you mean {scope['path']}?" if is_route else ""


def _wrong_body(request: Request, error: RequestValidationError) -> Response:
    """Name the first field that is wrong, in OpenAI's way: with status 400."""
    if isinstance(error.body, bytes):  # was not read as JSON
        told = "content-type: must be application/json"
        return ApiError(400, told, param="content-type").response(request.scope)
    return fault_of(error.errors()).response(request.scope)


def fault_of(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of pydantic's errors."""
    fault = errors[0]
    # In angle brackets: which of several types the value was taken for.
    place = [each for each in fault["loc"] if not str(each).startswith("<")]
    if place and place[0] in ("body", "query", "path"):
        del place[0]
    if not place:
        return ApiError(400, "the body must be a JSON object")
    param = str(place[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in place[1:])
    unknown = fault["type"] == "extra_forbidden"
    text = "unknown field" if unknown else str(fault["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {text}", param=param, code=_CODES.get(fault["type"]))


def _failed(request: Request, error: Exception) -> Response:
    failure = ApiError(500, "internal error of the gateway", "server_error")
    return failure.response(request.scope)


HANDLERS = {
    ApiError: _answer,
    ClientDisconnectedError: _gone,
    HTTPException: _http,
    RequestValidationError: _wrong_body,
    Exception: _failed,
}
