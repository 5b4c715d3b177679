"""What each error is in every API: one row per code.

A code is a word for programs. The server's, which are those of `engine.errors`, come at the end of
an error's text; others the client or the gateway finds itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ErrorCode(NamedTuple):
    """The status of gRPC by its name, of HTTP, and the types of OpenAI and Anthropic."""

    grpc: str
    http: int
    openai: str
    anthropic: str


_INVALID = ErrorCode("INVALID_ARGUMENT", 400, "invalid_request_error", "invalid_request_error")
_NOT_FOUND = ErrorCode("NOT_FOUND", 404, "invalid_request_error", "not_found_error")
_UNAVAILABLE = ErrorCode("UNAVAILABLE", 503, "server_error", "overloaded_error")
_FAILED = ErrorCode("INTERNAL", 500, "server_error", "api_error")

ERROR_CODES: Mapping[str, ErrorCode] = {
    # Of the engine and the stages.
    "invalid_value": _INVALID,
    "unknown_parameter": _INVALID,
    "context_length_exceeded": _INVALID,
    "unsupported": _INVALID._replace(grpc="UNIMPLEMENTED"),
    "queue_full": ErrorCode("UNAVAILABLE", 429, "rate_limit_error", "rate_limit_error"),
    "unavailable": _UNAVAILABLE,
    "insufficient_memory": _UNAVAILABLE,
    "cancelled": _FAILED._replace(grpc="CANCELLED"),
    "internal": _FAILED,
    "out_of_memory": _FAILED,
    "suspect_request": _FAILED,
    # Of settings and files: they end a start, and reach no client.
    "invalid_setting": _FAILED._replace(grpc="INVALID_ARGUMENT"),
    "invalid_checkpoint": _FAILED._replace(grpc="INVALID_ARGUMENT"),
    # Of the client.
    "timeout": ErrorCode("DEADLINE_EXCEEDED", 408, "timeout_error", "timeout_error"),
    "access_denied": _FAILED._replace(grpc="UNAUTHENTICATED"),
    "unknown_model": _UNAVAILABLE._replace(grpc="NOT_FOUND"),  # no fault of the gateway's client
    # Of the gateway.
    "model_not_found": _NOT_FOUND,
    "not_found": _NOT_FOUND,
    "previous_response_not_found": _INVALID,
    "thread_unsupported_request": _INVALID,
    "invalid_api_key": ErrorCode(
        "UNAUTHENTICATED", 401, "authentication_error", "authentication_error"
    ),
    "rate_limit_exceeded": ErrorCode(
        "RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_error"
    ),
    "too_large": ErrorCode("INVALID_ARGUMENT", 413, "invalid_request_error", "request_too_large"),
    "aborted": _FAILED._replace(grpc="ABORTED"),
}
