"""The standard input of commands that read it."""

import sys

from client.errors import InvalidRequestError


def require_standard_input() -> None:
    """Raise `InvalidRequestError` if there is none, as after `<&-`."""
    if sys.stdin is None:
        raise InvalidRequestError("is closed", param="standard input")
