"""Thinking that is not shown: it goes to the client and back in the signature of its block."""

from __future__ import annotations

import base64

_MARK = "omitted."


def signature_of(thinking: str) -> str:
    """Return the signature of a block whose thinking is left out."""
    return _MARK + base64.b64encode(thinking.encode()).decode()


def omitted_thinking(signature: str) -> str:
    """Return what was left out of the block with this signature; "" if it is none of ours."""
    mark, _, data = signature.partition(_MARK)
    try:
        return "" if mark else base64.b64decode(data, validate=True).decode()
    except ValueError:
        return ""
