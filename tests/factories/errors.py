"""Asserts of errors by what programs read: the code and the fields, not the sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.errors import TridentError


@contextmanager
def refuses(code: str, *params: str, match: str = "") -> Iterator[None]:
    """Expect an error with this code and these fields.

    Args:
        match: a pattern that is found in the message: a value, a name or a figure.
    """
    with pytest.raises(TridentError) as raised:
        yield
    error = raised.value
    assert (error.code, error.params) == (code, params)
    assert re.search(match, error.message), error.message
