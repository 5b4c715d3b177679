"""Every error that the client raises for its users, in one tree.

The text of each is one line fit to be shown; `from_status` and `from_text` map what a server
answers.
"""

import re
from collections.abc import Mapping, Sequence


class TridentClientError(Exception):
    """Base of all errors raised by `client`."""


class InvalidRequestError(TridentClientError, ValueError):
    """The request is wrong; sending it again fails again. The text names the field."""


class UnsupportedRequestError(InvalidRequestError):
    """The request asks for something that this server does not offer."""


class ConfigurationError(TridentClientError, ValueError):
    """An argument of the client itself is wrong: a certificate file, a header, a retry policy."""


class AccessDeniedError(TridentClientError):
    """The server wants a header with the right key for this; see `headers` of the client."""


class TLSError(TridentClientError):
    """No TLS connection with the server: its certificate, or ours, is not accepted."""


class UnavailableError(TridentClientError):
    """No server answers there, or its engine is not up; the same request may succeed later.

    This class, with those below it, is what a `RetryPolicy` tries again.
    """


class ConnectError(UnavailableError):
    """There is no connection with the server: the request was never sent."""


class QueueFullError(UnavailableError):
    """The server's waiting queue is at its limit; retry after a moment."""


class RequestTimeoutError(TridentClientError, TimeoutError):
    """The request took longer than its `timeout`; the server was told to drop it."""


class ReadTimeoutError(RequestTimeoutError):
    """The next piece of the answer took longer than the `read` limit; the request is withdrawn."""


class RequestCancelledError(TridentClientError):
    """The request was cancelled before it finished."""


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
# Codes and types of OpenAI's errors. Another try soon is no use if the key's limit is reached.
_BY_OPENAI: Mapping[str, type[TridentClientError]] = {
    "queue_full": QueueFullError,
    "unavailable": UnavailableError,
    "unsupported": UnsupportedRequestError,
    "invalid_request_error": InvalidRequestError,
    "authentication_error": AccessDeniedError,
    "timeout_error": RequestTimeoutError,
    "rate_limit_error": TridentClientError,
}
# "Maximum queue size of ... reached" is the engine's, which other servers' clients expect; "Exceeds
# maximum queue size" is Triton's, for a model with a queue limit of its own.
_QUEUE_FULL = r"[Mm]aximum queue size"


# A field as Trident names it: `n`, `messages[0].role`, `messages[0]["a b"]`.
PLACE = r'(?:[A-Za-z_][\w-]*|\["(?:[^"\\]|\\.)*"\])(?:\.[\w-]+|\[\d+\]|\["(?:[^"\\]|\\.)*"\])*'

# An error inside a stream comes without its code, and the header `triton_grpc_error` that would
# bring it makes tritonserver 24.10 abort; so the text has to tell. The first match counts.
_BY_TEXT: Sequence[tuple[str, type[TridentClientError]]] = (
    (_QUEUE_FULL, QueueFullError),
    (r"^the engine process", UnavailableError),  # whatever else the reason names
    (r"\bsupported\b", UnsupportedRequestError),
    (rf"^{PLACE}(, {PLACE})*: ", InvalidRequestError),  # Trident begins with the field's name
    (r"^(the )?request (id|parameters)\b", InvalidRequestError),
    (r"unknown model|^unexpected |^inference input|but expect", InvalidRequestError),  # Triton
    (r"was cancelled", RequestCancelledError),
    # Triton's, of a stage that has died: "Stub process 'tokenizer_0_0' is not healthy."
    (r"unavailable|not ready|is not healthy", UnavailableError),
)
# Statuses that say less than their texts.
_BY_STATUS_AND_TEXT: Sequence[tuple[str, str, type[TridentClientError]]] = (
    ("UNAVAILABLE", _QUEUE_FULL, QueueFullError),
    ("UNAVAILABLE", r"protocol is restricted", AccessDeniedError),  # tritonserver's own words
    ("RESOURCE_EXHAUSTED", r"larger than max", InvalidRequestError),  # gRPC's own words
)


def from_status(status: str, message: str) -> TridentClientError:
    """Return the error for the gRPC status name (`UNAVAILABLE`, ...) and text of a failed call.

    Statuses that are not the client's doing (INTERNAL, UNKNOWN, ...) become `ServerError`.
    """
    for known, pattern, kind in _BY_STATUS_AND_TEXT:
        if status == known and re.search(pattern, message):
            return kind(message)
    return _BY_STATUS.get(status, ServerError)(message or status)


def from_openai(error: Mapping[str, object]) -> TridentClientError:
    """Return the error for the object `error` in a gateway's answer, which is in OpenAI's form."""
    kinds = (_BY_OPENAI.get(str(error.get(name))) for name in ("code", "type"))
    kind = next((kind for kind in kinds if kind is not None), ServerError)
    return kind(str(error["message"]))


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


def from_text(message: str) -> TridentClientError:
    """Return the error for the text of one that came inside a stream."""
    own_words = re.sub(r"^in ensemble '[^']+', ", "", message)
    for pattern, kind in _BY_TEXT:
        if re.search(pattern, own_words):
            return kind(own_words)
    return ServerError(own_words)
