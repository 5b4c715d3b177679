"""Characters and classes of characters as EBNF writes them."""

from __future__ import annotations

import re

from engine.text.grammar.spec import GrammarTextError, check_literal

_CHARACTER = re.compile(r"\\x..|\\[uU][0-9a-fA-F]+|\\.|.", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_OPERATORS = "&~/["  # mean something else inside the brackets of a regular expression

_NUM_ASCII = 128
OTHERS = 1 << _NUM_ASCII  # all characters beyond ASCII: some of them begin with the same byte
ANY = 2 * OTHERS - 1


def characters(literal: str) -> list[str]:
    """Return the characters of what stands between the quotes of a literal.

    Raises:
        GrammarTextError: they are too many.
    """
    check_literal(literal)
    return [_character(written) for written in _CHARACTER.findall(literal)]


def symbol_of(character: str) -> int:
    """Return the bit of a character in sets of characters: its own one in ASCII, or `OTHERS`."""
    return 1 << min(ord(character), _NUM_ASCII)


def class_regex(written: str) -> str:
    """Return a class of characters, `[...]` or `.`, as a regular expression."""
    if written == ".":
        return "(?s:.)"
    return f"[{''.join(map(_class_member, _members(written)))}]"


def class_symbols(written: str) -> int:
    """Return the set of the characters in a class, or of some more beyond ASCII."""
    if written == ".":
        return ANY
    members = _members(written)
    is_negated = members[0] == "^"
    symbols, index = 0, int(is_negated)
    while index < len(members):
        low = high = ord(_character(members[index]))
        if members[index + 1 : index + 2] == ["-"] and index + 2 < len(members):
            high = ord(_character(members[index + 2]))
            index += 2
        index += 1
        for code in range(low, min(high, _NUM_ASCII) + 1):
            symbols |= 1 << code
        if high >= _NUM_ASCII:
            symbols |= OTHERS
    return (ANY & ~symbols) | OTHERS if is_negated else symbols


def _members(written: str) -> list[str]:
    members = _CHARACTER.findall(written[1:-1].replace("\\/", "/"))
    if not members or members == ["^"]:
        raise GrammarTextError("[]: is empty")
    return members


def _character(written: str) -> str:
    """Return the character that is `written`, perhaps as an escape."""
    if not written.startswith("\\"):
        return written
    if written[1] not in "xuU":
        return _ESCAPES.get(written[1], written[1])
    code = int(written[2:] or "0", 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarTextError(f"{written} is not a valid character")
    return chr(code)


def _class_member(written: str) -> str:
    if re.match(r"\\[xuU]", written):
        return f"\\x{{{ord(_character(written)):x}}}"
    return f"\\{written}" if written in _OPERATORS else written
