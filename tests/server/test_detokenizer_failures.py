"""An error inside the detokenizer ends one request, and Triton releases it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.release import released_all

pytestmark = pytest.mark.server

REPOSITORY = Path(__file__).parents[2] / "model_repository"

# The requests whose prompt is so long fail: at the first response, in the middle, at the last.
FAILING = """

from engine.errors import TridentError

_postprocess = Postprocessor.__call__


def _failing(self, message):
    length = _lengths.setdefault(message.uid, len(message.chunks[0].text_prefix))
    if length == 31 and not message.last:
        raise ZeroDivisionError("a bug")
    if length == 32 and not message.last and not message.chunks[0].text_prefix:
        raise TridentError("the tokenizer cannot decode the tokens: oops")
    if length == 33 and message.last:
        raise ZeroDivisionError("a bug")
    return _postprocess(self, message)


_lengths = {}
Postprocessor.__call__ = _failing
"""


def error_of(stream: Iterator[dict[str, list[Any]]]) -> str:
    try:
        answers = list(stream)
    except InferError as error:
        return str(error)
    raise AssertionError(answers)


def test_a_failure_of_the_detokenizer_ends_one_request_which_is_released(
    checkpoint: Path, tmp_path: Path
) -> None:
    repository = tmp_path / "model_repository"
    shutil.copytree(REPOSITORY, repository, ignore=shutil.ignore_patterns("__pycache__"))
    with (repository / "detokenizer" / "1" / "model.py").open("a") as model:
        model.write(FAILING)
    settings = {"model": str(checkpoint), "dtype": "float32"}
    sampling = {"stream": True, "max_tokens": 200, "exclude_input_in_output": False}
    with TritonServer(settings, ports=0, repository=repository, start_timeout_s=120) as server:
        caller = Caller(server.grpc_url, server.http_url)
        others = caller.stream(text_input="a" * 5, **sampling)
        next(others)
        for length, error in ((31, "internal error"), (32, "cannot decode"), (33, "internal")):
            assert error in error_of(caller.stream(text_input="a" * length, **sampling))
        with pytest.raises(InferError, match="internal error"):  # its only response is its last
            caller.collect(text_input="a" * 33, max_tokens=5)
        assert len(list(others)) > 0
        assert caller.one(text_input="b", max_tokens=5)["text_output"]
        caller.close()
    assert released_all(server)
    assert len(re.findall("ZeroDivisionError: a bug", server.log)) >= 3
