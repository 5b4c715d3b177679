"""Rewrites character classes of regexes so that Python, JavaScript and llguidance agree."""

from __future__ import annotations

import re

_CLASS = re.compile(r"\[\^?\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*\]", re.DOTALL)
_TOKEN = re.compile(rf"\\.|{_CLASS.pattern}|.", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_"}


def portable(regex: str) -> str:
    r"""Return `regex` with `\d` and `\w` for ASCII, except where a class is negated.

    JSON Schema's regular expressions are JavaScript's, where these are ASCII; in Python and in
    llguidance they are different parts of Unicode. What this matches, it matches in all of them.
    """
    return "".join(map(_rewritten, _TOKEN.findall(regex)))


def _rewritten(token: str) -> str:
    if token in _ASCII:
        return f"[{_ASCII[token]}]"
    if token.startswith("[") and not token.startswith("[^"):
        return _ESCAPE.sub(lambda escape: _ASCII.get(escape[0], escape[0]), token)
    return token
