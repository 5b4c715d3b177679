"""Every error that Trident raises for its users, in one tree.

Each class has a `code`, a word for programs that goes with the error through all processes to the
client; `client.error_codes` lists its status in each API.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Self
from urllib.parse import quote

_MAX_CHARACTERS = 1000
_MAX_PARAM_CHARACTERS = 256  # in the suffix


class ErrorReport(NamedTuple):
    """An error on its way to another process; the fields are those of `TridentError`."""

    code: str
    message: str
    params: tuple[str, ...] = ()
    figures: Mapping[str, int] = {}


class TridentError(Exception):
    """Base of all errors raised by Trident; its text is fit to be shown to a user.

    Attributes:
        code: a word for programs; each class has its own.
        triton_code: the name of the Triton error code that a server stage answers with.
        message: what is wrong and what to do next, without the fields.
        params: the fields that are wrong; the first is the one to point at.
        figures: numbers of the message, by name, for programs.
    """

    code: ClassVar[str] = "internal"
    triton_code: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, param: str | Sequence[str] = (), **figures: int) -> None:
        """Make an error whose text is `message`, after the field or fields `param`."""
        self.message = message
        self.params = (param,) if isinstance(param, str) else tuple(param)
        self.figures = figures
        super().__init__(f"{', '.join(self.params)}: {message}" if self.params else message)

    @staticmethod
    def of(report: ErrorReport) -> TridentError:
        """Return the error that another process reported."""
        kind = _BY_CODE.get(report.code, TridentError)
        return kind(report.message, param=report.params, **report.figures)

    def report(self) -> ErrorReport:
        """Return what another process gets of the error."""
        params = tuple(map(shown, self.params))
        return ErrorReport(self.code, shown(self.message), params, self.figures)

    def reworded(self, message: str, *, param: str | Sequence[str] = ()) -> Self:
        """Return the same error with other words and fields."""
        return type(self)(message, param=param, **self.figures)

    def text(self) -> str:
        """Return the error for a client that gets a text alone: with its code at the end.

        The end is ` [code=... param=...]`, which our clients remove. No value in it holds a space:
        whatever the text quotes, its last bracket is ours.
        """
        values = {"code": self.code}
        param = ",".join(quote(shown(each), safe=_SAFE) for each in self.params)
        if 0 < len(param) <= _MAX_PARAM_CHARACTERS:
            values["param"] = param
        values |= {name: str(figure) for name, figure in self.figures.items()}
        return f"{shown(str(self))} [{' '.join(f'{name}={each}' for name, each in values.items())}]"


class RequestError(TridentError, ValueError):
    """A request is wrong: the error names the field, what was found and what is allowed."""

    code: ClassVar[str] = "invalid_value"
    triton_code: ClassVar[str] = "INVALID_ARG"


class UnknownParameterError(RequestError):
    """A request has a field that there is not."""

    code: ClassVar[str] = "unknown_parameter"


class ContextLengthError(RequestError):
    """A prompt, or it and the tokens asked for, exceed `max_model_len`.

    Of a prompt that is too long by itself the figures `max_model_len` and either `num_tokens` or,
    where not all of it was tokenised, `more_than` give its length.
    """

    code: ClassVar[str] = "context_length_exceeded"


class UnsupportedError(RequestError):
    """A request or setting asks for something that Trident does not offer (yet)."""

    code: ClassVar[str] = "unsupported"
    triton_code: ClassVar[str] = "UNSUPPORTED"


class QueueFullError(TridentError):
    """The waiting queue is at its limit; the same request may succeed later."""

    code: ClassVar[str] = "queue_full"
    triton_code: ClassVar[str] = "UNAVAILABLE"


class RequestCancelledError(TridentError):
    """The client cancelled the request, or its deadline passed."""

    code: ClassVar[str] = "cancelled"
    triton_code: ClassVar[str] = "CANCELLED"


class EngineDeadError(TridentError):
    """The engine process has ended or did not start."""

    code: ClassVar[str] = "unavailable"
    triton_code: ClassVar[str] = "UNAVAILABLE"


class SuspectRequestError(TridentError):
    """The engine process crashed repeatedly while it ran this request."""

    code: ClassVar[str] = "suspect_request"


class ConfigError(TridentError, ValueError):
    """A setting is wrong: the error names it and what is allowed."""

    code: ClassVar[str] = "invalid_setting"
    triton_code: ClassVar[str] = "INVALID_ARG"


class CheckpointError(TridentError, ValueError):
    """A checkpoint is missing, incomplete or broken. The text names the file or tensor."""

    code: ClassVar[str] = "invalid_checkpoint"
    triton_code: ClassVar[str] = "INVALID_ARG"


class InsufficientMemoryError(TridentError):
    """The weights, or the KV cache of one full-length sequence, do not fit."""

    code: ClassVar[str] = "insufficient_memory"
    triton_code: ClassVar[str] = "UNAVAILABLE"


class StepOutOfMemoryError(TridentError):
    """The device had no memory for a step: its requests end, and others go on."""

    code: ClassVar[str] = "out_of_memory"


def shown(text: str) -> str:
    """Return `text` for clients and logs: truncated, and valid Unicode."""
    cut = text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
    return cut.encode("utf-8", "backslashreplace").decode("utf-8")


def _classes(kind: type[TridentError]) -> list[type[TridentError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in _classes(below))]


_SAFE = "[]\"'"  # of what the name of a field may hold, beside letters, digits and _.-~
_BY_CODE = {kind.code: kind for kind in _classes(TridentError)}
