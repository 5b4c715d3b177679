"""Every error that the client and the launcher raise for their users, in one tree.

The text of each is one line fit to be shown; `from_status` maps what a server answers.
"""

import re
from collections.abc import Mapping


class TridentClientError(Exception):
    """Base of all errors raised by `client`."""


class InvalidRequestError(TridentClientError, ValueError):
    """The request is wrong; sending it again fails again. The text names the field."""


class UnsupportedRequestError(InvalidRequestError):
    """The request asks for something that this server does not offer."""


class UnavailableError(TridentClientError):
    """No server answers there, or its engine is not up; the same request may succeed later."""


class QueueFullError(UnavailableError):
    """The server's waiting queue is at its limit; retry after a moment."""


class RequestTimeoutError(TridentClientError, TimeoutError):
    """The request took longer than its `timeout`; the server was told to drop it."""


class RequestCancelledError(TridentClientError):
    """The request was cancelled before it finished."""


class ServerError(TridentClientError):
    """The server failed at a request that was right."""


class ServerStartError(TridentClientError):
    """tritonserver cannot be started. `hint` says what to do about it.

    Attributes:
        hint: the next step as a sentence or command; empty if the text says it all.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


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
}
_QUEUE_FULL = "Maximum queue size of"  # Triton's own words for it, which peers' clients look for


def from_status(status: str, message: str) -> TridentClientError:
    """Return the error for a gRPC status name (`UNAVAILABLE`, ...) and the server's text.

    Statuses that are not the client's doing (INTERNAL, UNKNOWN, ...) become `ServerError`.
    """
    own_words = re.sub(r"^in ensemble '\w+', ", "", message)
    if _QUEUE_FULL in message:
        return QueueFullError(own_words)
    return _BY_STATUS.get(status, ServerError)(own_words or status)
