"""One log format for the engine process and the stubs: both write to the server's stderr.

A record may carry `extra={"fields": {...}}`: machine-readable values. As text they follow the
message as `name=value`; in JSON they are a nested object.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

LogFormat = Literal["text", "json"]

_TALKATIVE = ("httpx", "httpx2")  # which log each request of a download
_PLAIN = re.compile(r"[\w.:/+-]+", re.ASCII)


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO trident.engine: message name=value ...`, in local time."""

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the base's name)
        """Return the line; what follows it, as a traceback, is the base's part."""
        words = [super().formatMessage(record)]
        words += [f"{name}={_text(value)}" for name, value in _fields(record).items()]
        return " ".join(words)


class JsonFormatter(logging.Formatter):
    """One object per line: `ts` (RFC 3339, UTC), `level`, `logger`, `event` and `fields`.

    A traceback is the field `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = dict(_fields(record))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": _valid(record.getMessage()),
            "fields": {name: _valid(value) for name, value in fields.items()},
        }
        return msgspec.json.encode(line).decode()


def configure_logging(log_format: LogFormat = "text") -> None:
    """Log from INFO on to stderr, from now on in `log_format`."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.WARNING)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, "fields", {})
    return {name: value for name, value in fields.items() if value is not None}


def _valid(value: Any) -> Any:
    """Return strings as valid Unicode: a client's own may hold anything."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _text(value: Any) -> str:
    """Return a value as one word, or quoted, and never with a line break."""
    text = f"{value:.6f}" if isinstance(value, float) else str(value)
    return text if _PLAIN.fullmatch(text) else msgspec.json.encode(_valid(text)).decode()
