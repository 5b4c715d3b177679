import json
import logging
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.launch import server_log
from engine.service.logs import JsonFormatter, LogFormat, TextFormatter, configure_logging


def record(message: str, exc_info: Any = None, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("trident.test", logging.INFO, "x.py", 1, message, (), exc_info)
    made.__dict__.update(extra)
    return made


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers
    root.handlers = []  # so that nobody closes pytest's own
    yield
    root.setLevel(level)
    root.handlers = handlers


@pytest.mark.usefixtures("restored_logging")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_launcher_reads_what_is_logged(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    configure_logging("text")  # before the settings are known
    configure_logging(log_format)
    log = logging.getLogger("trident.test")
    log.debug("not shown")
    log.info("a request %s", "ended", extra={"fields": {"uid": 3, "error": None}})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("{") == (log_format == "json")
    parsed = server_log.parse(line)
    assert (parsed.severity, parsed.source) == ("I", "trident.test")
    assert parsed.text == "a request ended uid=3"


def test_json_has_the_time_in_utc_and_a_traceback_as_a_field() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        line = JsonFormatter().format(record("failed", exc_info=sys.exc_info(), created=0.25))
    assert "\n" not in line
    fields = json.loads(line)
    assert set(fields) == {"ts", "level", "logger", "event", "fields"}
    assert datetime.fromisoformat(fields["ts"]).tzinfo == UTC
    assert fields["fields"]["exception"].endswith("ValueError: no")


def test_text_quotes_what_is_no_single_word() -> None:
    line = TextFormatter().format(record("done", fields={"id": 'a "b"\nc', "s": 0.5, "x": ""}))
    assert line.endswith(' INFO trident.test: done id="a \\"b\\"\\nc" s=0.500000 x=""')


@given(st.text() | st.text(st.characters(categories=["Cs", "Cc", "Zl", "Zp"])))
def test_no_request_id_can_forge_a_line(request_id: str) -> None:
    made = record("done", fields={"request_id": request_id})
    as_json = JsonFormatter().format(made)
    assert len(as_json.split("\n")) == 1
    readable = request_id.encode("utf-8", "backslashreplace").decode()
    assert json.loads(as_json)["fields"]["request_id"] == readable
    as_text = TextFormatter().format(made)
    assert len(as_text.split("\n")) == len(as_text.split("\r")) == 1
    as_text.encode()
