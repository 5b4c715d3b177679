"""An error inside the detokenizer ends one request, and Triton releases it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError

pytestmark = pytest.mark.server


def error_of(stream: Iterator[dict[str, list[Any]]]) -> str:
    try:
        answers = list(stream)
    except InferError as error:
        return str(error)
    raise AssertionError(answers)


def test_a_failure_of_the_detokenizer_ends_one_request_which_is_released(
    killable: TritonServer,
) -> None:
    sampling = {"stream": True, "max_tokens": 200, "exclude_input_in_output": False}
    caller = Caller(killable.grpc_url, killable.http_url)
    others = caller.stream(text_input="a" * 5, **sampling)
    next(others)
    for length, error in ((31, "internal error"), (32, "cannot decode"), (33, "internal")):
        assert error in error_of(caller.stream(text_input="a" * length, **sampling))
    with pytest.raises(InferError, match="internal error"):  # its only response is its last
        caller.collect(text_input="a" * 33, max_tokens=5)
    assert len(list(others)) > 0
    assert caller.one(text_input="b", max_tokens=5)["text_output"]
    caller.close()
    assert len(re.findall("ZeroDivisionError: a bug", killable.log)) >= 3
