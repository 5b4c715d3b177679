"""An error keeps its code, its fields and its figures from the engine to each API."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.error_codes import ERROR_CODES
from client.errors import (
    InvalidRequestError,
    QueueFullError,
    RequestCancelledError,
    ServerError,
    TridentClientError,
    UnavailableError,
    UnsupportedRequestError,
    from_openai,
    from_status,
    from_text,
)
from client.gateway.errors import ApiError
from engine.errors import ContextLengthError, RequestError, TridentError

README = Path(__file__).parents[2] / "client" / "README.md"
# What tritonserver makes of the codes of the Python backend.
GRPC = {
    "INTERNAL": "INTERNAL",
    "INVALID_ARG": "INVALID_ARGUMENT",
    "UNAVAILABLE": "UNAVAILABLE",
    "UNSUPPORTED": "UNIMPLEMENTED",
    "CANCELLED": "CANCELLED",
}
KINDS = {
    "invalid_value": InvalidRequestError,
    "unknown_parameter": InvalidRequestError,
    "context_length_exceeded": InvalidRequestError,
    "unsupported": UnsupportedRequestError,
    "queue_full": QueueFullError,
    "unavailable": UnavailableError,
    "insufficient_memory": UnavailableError,
    "cancelled": RequestCancelledError,
    "internal": ServerError,
    "out_of_memory": ServerError,
    "suspect_request": ServerError,
    "invalid_setting": InvalidRequestError,
    "invalid_checkpoint": InvalidRequestError,
}


def classes(kind: type[TridentError] = TridentError) -> list[type[TridentError]]:
    return [kind, *(each for below in kind.__subclasses__() for each in classes(below))]


ENGINE = [kind for kind in classes() if kind.__module__ == TridentError.__module__]
names = st.text(min_size=1, max_size=40).filter(lambda name: ": " not in name)


def test_codes_of_the_engine_are_in_the_table() -> None:
    assert {kind.code for kind in ENGINE} == KINDS.keys()
    assert {kind.code: GRPC[kind.triton_code] for kind in ENGINE} == {
        code: ERROR_CODES[code].grpc for code in KINDS
    }


def bodies(code: str) -> tuple[Any, Any]:
    """Return what OpenAI's and Anthropic's clients get for a code."""
    error = ApiError("no", param="n", code=code)
    state = {"state": {"request_id": "r"}}
    openai = json.loads(error.body({"path": "/v1/completions", **state}))
    anthropic = json.loads(error.body({"path": "/v1/messages", **state}))
    return openai, anthropic


def test_readme_lists_the_table() -> None:
    rows = []
    for code, row in ERROR_CODES.items():
        openai, anthropic = bodies(code)
        assert openai["error"] == {
            "message": "n: no",
            "type": row.openai,
            "param": "n",
            "code": code,
        }
        assert anthropic["error"] == {
            "type": row.anthropic,
            "message": "n: no",
            "details": {"error_code": code},
        }
        cells = (code, row.grpc, str(row.http), row.openai, row.anthropic)
        rows.append(" | ".join(f"`{cell}`" for cell in cells))
        print(rows[-1])
    listed = re.findall(r"^\| (`\w+` \| `[A-Z_]+` \| .*) \|$", README.read_text(), re.MULTILINE)
    assert listed == rows


@pytest.mark.parametrize("kind", ENGINE, ids=lambda kind: kind.__name__)
def test_error_of_the_engine_reaches_the_client(kind: type[TridentError]) -> None:
    error = kind("is no good (got 3 [code=x param=y])", param=("a.b", 'c["d e"]'), num_tokens=3)
    known = TridentError.of(error.report())  # over processes
    assert (type(known), str(known), known.figures) == (kind, str(error), error.figures)
    for text in (known.text(), f"in ensemble 'ensemble', {known.text()}"):
        for found in (from_text(text), from_status(ERROR_CODES[kind.code].grpc, text)):
            assert type(found) is KINDS[kind.code]
            assert str(found) == str(error)
            assert (found.code, found.params, found.figures) == (
                kind.code,
                error.params,
                error.figures,
            )


@given(message=st.text(), params=st.lists(names, max_size=3))
def test_no_text_passes_for_another_code(message: str, params: list[str]) -> None:
    message += " [code=internal param=z]"
    error = RequestError(message, param=params)
    found = from_text(error.text())
    assert type(found) is InvalidRequestError
    assert found.code == "invalid_value"
    assert found.params in ((), tuple(error.report().params))


def test_long_text_keeps_its_code() -> None:
    error = ContextLengthError("x" * 5000, param="input_ids", num_tokens=9, max_model_len=8)
    found = from_text(error.text())
    assert found.code == "context_length_exceeded"
    assert found.figures == {"num_tokens": 9, "max_model_len": 8}
    assert len(str(found)) == 1000


@pytest.mark.parametrize(
    ("text", "kind", "code"),
    [
        (
            "unexpected inference input 'a' for model 'ensemble'",
            InvalidRequestError,
            "invalid_value",
        ),
        ("Request for unknown model: 'a' is not found", InvalidRequestError, "unknown_model"),
        ("Exceeds maximum queue size", QueueFullError, "queue_full"),
        ("Stub process 'tokenizer_0_0' is not healthy.", UnavailableError, "unavailable"),
        ("the request was cancelled", RequestCancelledError, "cancelled"),
        ("n: a sentence alone says nothing", ServerError, "internal"),
        ("n: no [code=unheard_of]", ServerError, "internal"),
    ],
)
def test_text_of_triton(text: str, kind: type[TridentClientError], code: str) -> None:
    found = from_text(text)
    assert (type(found), found.code, str(found)) == (kind, code, text)


@pytest.mark.parametrize("code", KINDS)
def test_error_passes_through_a_gateway(code: str) -> None:
    openai, _ = bodies(code)
    found = from_openai(openai["error"])
    assert (type(found), found.code, found.params, str(found)) == (
        KINDS[code],
        code,
        ("n",),
        "n: no",
    )


def test_text_of_an_error_ends_with_its_code() -> None:
    error = RequestError("is wrong", param="n")
    assert error.text() == "n: is wrong [code=invalid_value param=n]"
