"""Bodies of errors, in OpenAI's form and in Anthropic's."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    """What is wrong, for users and for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct):
    """An answer that is an error, or the last event of a stream that failed."""

    error: ErrorDetail


class AnthropicErrorCode(Struct):
    """A word for programs."""

    error_code: str


class AnthropicErrorDetail(Struct):
    """What is wrong, for users and for programs."""

    type: str
    message: str
    details: AnthropicErrorCode | UnsetType = UNSET


class AnthropicErrorBody(Struct, tag="error"):
    """An answer of Anthropic's API that is an error, or the last event of a stream that failed."""

    error: AnthropicErrorDetail
    request_id: str
