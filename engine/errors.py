"""Every error that Trident raises for its users, in one tree.

Each class carries `code`, the name of the Triton error code that a server stage answers with.
"""

from typing import ClassVar


class TridentError(Exception):
    """Base of all errors raised by Trident; its text is fit to be shown to a user."""

    code: ClassVar[str] = "INTERNAL"


class RequestError(TridentError, ValueError):
    """A request is wrong. The text names the field, what was found and what is allowed."""

    code: ClassVar[str] = "INVALID_ARG"


class UnsupportedError(RequestError):
    """A request or setting asks for something that Trident does not offer (yet)."""

    code: ClassVar[str] = "UNSUPPORTED"


class QueueFullError(TridentError):
    """The waiting queue is at its limit; the same request may succeed later."""

    code: ClassVar[str] = "UNAVAILABLE"


class RequestCancelledError(TridentError):
    """The client cancelled the request, or its deadline passed."""

    code: ClassVar[str] = "CANCELLED"


class EngineDeadError(TridentError):
    """The engine process has ended or did not start."""

    code: ClassVar[str] = "UNAVAILABLE"


class SuspectRequestError(TridentError):
    """The engine process crashed repeatedly while it ran this request."""

    code: ClassVar[str] = "INTERNAL"


class ConfigError(TridentError, ValueError):
    """A setting is wrong. The text names it and says what is allowed."""

    code: ClassVar[str] = "INVALID_ARG"


class CheckpointError(TridentError, ValueError):
    """A checkpoint is missing, incomplete or broken. The text names the file or tensor."""

    code: ClassVar[str] = "INVALID_ARG"


class InsufficientMemoryError(TridentError):
    """The weights, or the KV cache of one full-length sequence, do not fit."""

    code: ClassVar[str] = "UNAVAILABLE"


class StepOutOfMemoryError(TridentError):
    """The device had no memory for a step: its requests end, and others go on."""

    code: ClassVar[str] = "INTERNAL"


def error_of(code: str, text: str) -> TridentError:
    """Return the exception for an error that another process reported."""
    for kind in (RequestError, UnsupportedError, QueueFullError, RequestCancelledError):
        if kind.code == code:
            return kind(text)
    return TridentError(text)
