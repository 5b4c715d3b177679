"""Every error that the client raises for its users, in one tree.

The text of each is one line fit to be shown; `from_status`, `from_text` and `from_openai` map what
a server answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from client.error_codes import ERROR_CODES


class TridentClientError(Exception):
    """Base of all errors raised by `client`.

    Attributes:
        code: a word for programs, as in `client.error_codes`.
        message: what is wrong and what to do next, without the fields.
        params: the fields that are wrong; the first is the one to point at.
        figures: numbers of the message, by name, for programs.
    """

    code: str = "internal"

    def __init__(
        self,
        message: str,
        *,
        param: str | Sequence[str] = (),
        code: str | None = None,
        **figures: int,
    ) -> None:
        """Make an error whose text is `message`, after the field or fields `param`."""
        self.code = code or type(self).code
        self.message = message
        self.params = (param,) if isinstance(param, str) else tuple(param)
        self.figures = figures
        super().__init__(f"{', '.join(self.params)}: {message}" if self.params else message)


class InvalidRequestError(TridentClientError, ValueError):
    """The request is wrong; sending it again fails again. The text names the field."""

    code: str = "invalid_value"


class UnsupportedRequestError(InvalidRequestError):
    """The request asks for something that this server does not offer."""

    code: str = "unsupported"


class ConfigurationError(TridentClientError, ValueError):
    """An argument of the client itself is wrong: a certificate file, a header, a retry policy."""

    code: str = "invalid_setting"


class AccessDeniedError(TridentClientError):
    """The server wants a header with the right key for this; see `headers` of the client."""

    code: str = "access_denied"


class TLSError(TridentClientError):
    """No TLS connection with the server: its certificate, or ours, is not accepted."""


class UnavailableError(TridentClientError):
    """No server answers there, or its engine is not up; the same request may succeed later.

    This class, with those below it, is what a `RetryPolicy` tries again.
    """

    code: str = "unavailable"


class ConnectError(UnavailableError):
    """There is no connection with the server: the request was never sent."""


class QueueFullError(UnavailableError):
    """The server's waiting queue is at its limit; retry after a moment."""

    code: str = "queue_full"


class RequestTimeoutError(TridentClientError, TimeoutError):
    """The request took longer than its `timeout`; the server drops it."""

    code: str = "timeout"


class ReadTimeoutError(RequestTimeoutError):
    """The next piece of the answer took longer than the `read` limit; the request is withdrawn."""


class RequestCancelledError(TridentClientError):
    """The request was cancelled before it finished."""

    code: str = "cancelled"


class ServerError(TridentClientError):
    """The server failed at a request that was right."""


_BY_STATUS: Mapping[str, type[TridentClientError]] = {
    "INVALID_ARGUMENT": InvalidRequestError,
    "OUT_OF_RANGE": InvalidRequestError,
    "NOT_FOUND": InvalidRequestError,
    "ALREADY_EXISTS": InvalidRequestError,
    "UNIMPLEMENTED": UnsupportedRequestError,
    "UNAVAILABLE": UnavailableError,
    "RESOURCE_EXHAUSTED": UnavailableError,
    "DEADLINE_EXCEEDED": RequestTimeoutError,
    "CANCELLED": RequestCancelledError,
    "UNAUTHENTICATED": AccessDeniedError,
    "PERMISSION_DENIED": AccessDeniedError,
}
_BY_CODE: Mapping[str, type[TridentClientError]] = {
    "queue_full": QueueFullError,
    "rate_limit_exceeded": TridentClientError,  # another try soon is no use
}
# Types of OpenAI's errors, of servers that give other codes or none.
_BY_OPENAI: Mapping[str, type[TridentClientError]] = {
    "invalid_request_error": InvalidRequestError,
    "authentication_error": AccessDeniedError,
    "timeout_error": RequestTimeoutError,
    "rate_limit_error": TridentClientError,
}
# What follows the text of an error of ours: `engine.errors` writes it.
_SUFFIX = re.compile(r" \[code=(\w+)((?: \w+=\S+)*)\]\Z")

# Errors of tritonserver itself have no code, and within a stream no status either: its own words,
# and gRPC's, say what they are. Beside each code are the statuses for which the words count.
_TRITON_TEXTS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    (r"[Mm]aximum queue size", "queue_full", ("UNAVAILABLE",)),  # of a model's own queue policy
    (r"protocol is restricted", "access_denied", ("UNAVAILABLE",)),
    (r"unknown model", "unknown_model", ("NOT_FOUND", "UNAVAILABLE")),
    (r"larger than max", "invalid_value", ("RESOURCE_EXHAUSTED",)),
    (r"^unexpected |^inference input|but expect", "invalid_value", ()),
    (r"was cancelled", "cancelled", ()),
    # Of a stage that has died: "Stub process 'tokenizer_0_0' is not healthy."
    (r"unavailable|not ready|is not healthy", "unavailable", ()),
)


def from_status(status: str, message: str) -> TridentClientError:
    """Return the error for the gRPC status name (`UNAVAILABLE`, ...) and text of a failed call.

    Statuses that are not the client's doing (INTERNAL, UNKNOWN, ...) become `ServerError`.
    """
    if (error := _with_code(message)) is not None:
        return error
    text = _own_words(message)
    for pattern, code, statuses in _TRITON_TEXTS:
        if status in statuses and re.search(pattern, text):
            return _made(text, code)
    return _BY_STATUS.get(status, ServerError)(text or status)


def from_text(message: str) -> TridentClientError:
    """Return the error for the text of one that came inside a stream, without its status.

    The header `triton_grpc_error` that would bring the status makes tritonserver 24.10 abort.
    """
    if (error := _with_code(message)) is not None:
        return error
    text = _own_words(message)
    codes = (code for pattern, code, _ in _TRITON_TEXTS if re.search(pattern, text))
    return _made(text, next(codes, "internal"))


def from_openai(error: Mapping[str, object]) -> TridentClientError:
    """Return the error for the object `error` in a gateway's answer, which is in OpenAI's form."""
    text, code, param = str(error["message"]), error.get("code"), error.get("param")
    if isinstance(code, str) and code in ERROR_CODES:
        return _made(text, code, (param,) if isinstance(param, str) else ())
    return _BY_OPENAI.get(str(error.get("type")), ServerError)(text)


def from_connection(message: str, url: str) -> TridentClientError:
    """Return the error for the status UNAVAILABLE: words of the server at `url`, or of gRPC.

    gRPC's own are full of addresses and of what OpenSSL calls its functions.
    """
    if "Hostname Verification" in message:
        return TLSError(f"no TLS with {url}: its certificate is for another name")
    if routine := re.search(r"SSL routines:\w+:([A-Z_]+)", message):
        return TLSError(f"no TLS with {url}: {routine[1].lower().replace('_', ' ')}")
    if re.search(r"failed to connect.*Socket closed", message):
        return ConnectError(
            f"the server at {url} closes the connection: it may want TLS, or a client certificate, "
            "or that is not its gRPC port"
        )
    if re.search(r"failed to connect|errors resolving", message, re.IGNORECASE):
        return ConnectError(f"no server answers at {url}")
    error = from_status("UNAVAILABLE", message)
    if type(error) is UnavailableError:
        return UnavailableError(f"the server at {url} is unavailable: {message}")
    return error


def _with_code(text: str) -> TridentClientError | None:
    """Return the error of a text that ends with its code; None if it does not."""
    suffix = _SUFFIX.search(text)
    if suffix is None or suffix[1] not in ERROR_CODES:
        return None
    values = dict(each.split("=", 1) for each in suffix[2].split())
    params = [unquote(each) for each in values.pop("param", "").split(",") if each]
    figures = {name: int(each) for name, each in values.items() if each.isdecimal()}
    return _made(_own_words(text[: suffix.start()]), suffix[1], params, figures)


def _made(
    text: str, code: str, params: Sequence[str] = (), figures: Mapping[str, int] = {}
) -> TridentClientError:
    """Return the error with a code of the table; `text` begins with the fields `params`."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(ERROR_CODES[code].grpc, ServerError)
    fields = f"{', '.join(params)}: "
    if not text.startswith(fields):  # it was cut
        params, fields = (), ""
    return kind(text.removeprefix(fields), param=params, code=code, **figures)


def _own_words(text: str) -> str:
    return re.sub(r"^in ensemble '[^']+', ", "", text)
