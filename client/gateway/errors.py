"""Errors: a status, and a body in the form of the API that was asked, OpenAI's or Anthropic's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Scope

from client.error_codes import ERROR_CODES
from client.errors import TridentClientError, UnavailableError
from client.gateway.schemas.errors import (
    AnthropicErrorBody,
    AnthropicErrorCode,
    AnthropicErrorDetail,
    ErrorBody,
    ErrorDetail,
)

_CLIENT_CLOSED_REQUEST = 499  # nginx's; the status that the log shows
_RETRY_AFTER_S = 1
# Inputs of the ensemble that clients of this front know by other names.
_INPUTS = {"text_input": "prompt", "input_ids": "prompt"}
# Of pydantic's types of errors, with our own.
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "thread_unsupported_request": "thread_unsupported_request",
    "unsupported": "unsupported",
}
_STATUS_CODES = {HTTPStatus.NOT_FOUND: "not_found", HTTPStatus.UNAUTHORIZED: "invalid_api_key"}
_PREFIX = "/v1"  # that clients forget in the address
_ANTHROPIC_PATH = f"{_PREFIX}/messages"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        code: a word for programs, as in `client.error_codes`.
        message: what is wrong and what to do next, without the fields.
        params: the fields that are wrong; the first is the one to point at.
        status: of HTTP.
        retry_after: seconds after which it may go well.
        figures: numbers of the message, by name.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | Sequence[str] = (),
        code: str = "invalid_value",
        status: int | None = None,
        retry_after: int | None = None,
        figures: Mapping[str, int] = {},
    ) -> None:
        """Make an error whose text is `message`, after the field or fields `param`.

        Args:
            status: another one than that of `code`.
        """
        self.code = code
        self.message = message
        self.params = (param,) if isinstance(param, str) else tuple(param)
        self.status = status or ERROR_CODES[code].http
        self.retry_after = retry_after
        self.figures = figures
        super().__init__(f"{', '.join(self.params)}: {message}" if self.params else message)

    @property
    def param(self) -> str | None:
        """The field to point at, if there is one."""
        return next(iter(self.params), None)

    def reworded(self, message: str, param: Sequence[str]) -> ApiError:
        """Return the same error with other words and fields."""
        return ApiError(
            message,
            param=param,
            code=self.code,
            status=self.status,
            retry_after=self.retry_after,
            figures=self.figures,
        )

    def body(self, scope: Scope) -> bytes:
        """Return it as JSON, in the form of the API that the request of `scope` asks."""
        known = ERROR_CODES[self.code]
        if is_anthropic(scope["path"]):
            code = AnthropicErrorCode(self.code)
            error = AnthropicErrorDetail(known.anthropic, str(self), code)
            return msgspec.json.encode(AnthropicErrorBody(error, scope["state"]["request_id"]))
        detail = ErrorDetail(str(self), known.openai, self.param, self.code)
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
    if error.code == "unknown_model":  # no fault of a client
        return ApiError(f"{error}; see --served-model-name of the gateway", code="unavailable")
    params, message = [*error.params], error.message
    for own, theirs in {**_INPUTS, **names}.items():
        pattern = rf"{own}(?![\w/])"
        text = f"{', '.join(params)}: {message}"
        found = re.match(pattern, text)
        if found is not None and found.end() > len(text) - len(message):
            # What is inside a grammar of ours is a field of theirs.
            params, message = [theirs], text[found.end() :].removeprefix(": ")
        params = [re.sub(rf"^{pattern}", theirs, param) for param in params]
        message = re.sub(rf"(; |tokens of ){pattern}", rf"\g<1>{theirs}", message)
    may_go_well = isinstance(error, UnavailableError)
    return ApiError(
        message,
        param=params,
        code=error.code,
        retry_after=_RETRY_AFTER_S if may_go_well else None,
        figures=error.figures,
    )


def unsupported(param: str, message: str) -> ApiError:
    """Return the error for a field, or a value of it, that this gateway does not offer."""
    return ApiError(message, param=param, code="unsupported")


HANDLERS: Mapping[Any, Any]


def _answer(request: Request, error: ApiError) -> Response:
    return error.response(request.scope)


def _gone(request: Request, error: ClientDisconnectedError) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _http(request: Request, error: HTTPException) -> Response:
    text = str(error.detail)
    if error.status_code == HTTPStatus.NOT_FOUND:
        text = f"there is no {request.url.path[:128]}{_instead(request)}"
    code = _STATUS_CODES.get(HTTPStatus(error.status_code), "invalid_value")
    response = ApiError(text, code=code, status=error.status_code).response(request.scope)
    response.headers.update(error.headers or {})
    return response


def _instead(request: Request) -> str:
    scope = {**request.scope, "path": f"{_PREFIX}{request.url.path}"}
    is_route = any(each.matches(scope)[0] != Match.NONE for each in request.app.routes)
    return f"; did you mean {scope['path']}?" if is_route else ""


def _wrong_body(request: Request, error: RequestValidationError) -> Response:
    """Name the first field that is wrong, in OpenAI's way: with status 400."""
    if isinstance(error.body, bytes):  # was not read as JSON
        wrong = ApiError("must be application/json", param="content-type")
        return wrong.response(request.scope)
    return fault_of(error.errors()).response(request.scope)


def fault_of(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the first of pydantic's errors."""
    fault = errors[0]
    # In angle brackets: which of several types the value was taken for.
    path = [each for each in fault["loc"] if not str(each).startswith("<")]
    if path and path[0] in ("body", "query", "path"):
        del path[0]
    if not path:
        return ApiError("the body must be a JSON object")
    param = str(path[0]) + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path[1:])
    unknown = fault["type"] == "extra_forbidden"
    text = "unknown field" if unknown else str(fault["msg"]).removeprefix("Value error, ")
    return ApiError(text, param=param, code=_CODES.get(fault["type"], "invalid_value"))


def _failed(request: Request, error: Exception) -> Response:
    failure = ApiError("internal error of the gateway", code="internal")
    return failure.response(request.scope)


HANDLERS = {
    ApiError: _answer,
    ClientDisconnectedError: _gone,
    HTTPException: _http,
    RequestValidationError: _wrong_body,
    Exception: _failed,
}
