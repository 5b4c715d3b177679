"""From EBNF as users of vLLM and llama.cpp write it (`root ::= ...`) to llguidance's Lark."""

from __future__ import annotations

import json
import re

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GbnfToLarkError,
    GrammarParser,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from engine.text.grammar.spec import GrammarTextError

_ROOT = "root"
_CHARACTER = re.compile(r"\\x..|\\[uU][0-9a-fA-F]+|\\.|.", re.DOTALL)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
_OPERATORS = "&~/["  # mean something else inside the brackets of a regular expression


def is_ebnf(text: str) -> bool:
    """Whether `text` is EBNF rather than Lark."""
    return re.search(r"(?m)^\s*[\w-]+\s*::=", text) is not None


def lark_of(text: str) -> str:
    """Return an EBNF grammar in Lark.

    Every character is a lexeme of its own: llguidance's lexer takes the longest match, so that
    longer lexemes would exclude some of the texts that EBNF allows.

    Raises:
        GrammarTextError: with the place of the fault.
    """
    try:
        rules = GrammarParser().parse(text)
        if _ROOT not in rules:
            raise GrammarTextError(f'has no rule "{_ROOT}"')
        names = {name: f"rule_{place}" for place, name in enumerate(rules)} | {_ROOT: "start"}
        lines = [
            f"{names[name]}: {_lark(rule.alternatives, names)}" for name, rule in rules.items()
        ]
    except GbnfToLarkError as error:
        raise GrammarTextError(str(error)) from None
    except (RecursionError, IndexError):
        raise GrammarTextError("is nested too deeply, or ends inside an expression") from None
    return "\n".join(["%llguidance {}", *lines])


def _lark(node: ASTNode, names: dict[str, str]) -> str:
    match node:
        case LiteralNode():
            characters = map(_character, _CHARACTER.findall(node.value))
            return " ".join(json.dumps(each, ensure_ascii=False) for each in characters) or '""'
        case RegexNode():
            return "/(?s:.)/" if node.rx == "." else f"/{_class(node.rx)}/"
        case RuleRefNode():
            if node.name not in names:
                raise GrammarTextError(f'rule "{node.name}" is not defined')
            return names[node.name]
        case RepetitionNode():
            most = "" if node.max_times is None else node.max_times
            return f"({_lark(node.node, names)}){{{node.min_times},{most}}}"
        case SequenceNode():
            return " ".join(_lark(each, names) for each in node.nodes) or '""'
        case AlternativeNode():
            return f"({' | '.join(_lark(each, names) for each in node.alternatives)})"
    raise GrammarTextError(f"{type(node).__name__} is not supported")


def _character(written: str) -> str:
    """Return the character that is `written` in a literal, perhaps as an escape."""
    if not written.startswith("\\"):
        return written
    if written[1] not in "xuU":
        return _ESCAPES.get(written[1], written[1])
    return _chr(written)


def _chr(written: str) -> str:
    code = int(written[2:] or "0", 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise GrammarTextError(f"{written} is no character")
    return chr(code)


def _class(written: str) -> str:
    """Return a class of characters, `[...]`, as a regular expression."""
    inside = _CHARACTER.findall(written[1:-1].replace("\\/", "/"))
    if not inside or inside == ["^"]:
        raise GrammarTextError("[]: is empty")
    return f"[{''.join(map(_class_member, inside))}]"


def _class_member(written: str) -> str:
    if re.match(r"\\[xuU]", written):
        return f"\\x{{{ord(_chr(written)):x}}}"
    return f"\\{written}" if written in _OPERATORS else written
