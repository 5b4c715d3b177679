"""From EBNF as users of vLLM and llama.cpp write it (`root ::= ...`) to llguidance's Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby

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

from engine.text.grammar.ebnf_characters import characters, class_regex
from engine.text.grammar.endless_rules import without_endless_rules
from engine.text.grammar.lexemes import (
    Rules,
    choose_lexemes,
    is_regular,
    references,
    regular_rules,
    smallest_lexemes,
    used_rules,
    with_children,
)
from engine.text.grammar.spec import GrammarTextError

_ROOT = "root"


def is_ebnf(text: str) -> bool:
    """Whether `text` is EBNF rather than Lark."""
    return re.search(r"(?m)^\s*[\w-]+\s*::=", text) is not None


def lark_of(text: str, *, large_lexemes: bool = True) -> str:
    """Return an EBNF grammar in Lark.

    With `large_lexemes`, masks are computed faster; without, each character is a lexeme.

    Raises:
        GrammarTextError: with the position of the fault.
    """
    try:
        parsed = GrammarParser().parse(text)
        rules: Rules = {name: _spelt_out(rule.alternatives) for name, rule in parsed.items()}
        if _ROOT not in rules:
            raise GrammarTextError(f'has no rule "{_ROOT}"')
        for body in rules.values():
            for name in references(body):
                if name not in rules:
                    raise GrammarTextError(f'rule "{name}" is not defined')
        rules = without_endless_rules(used_rules(rules, _ROOT), _ROOT)
        regular = regular_rules(rules)
        rules = {name: _with_runs(body, regular) for name, body in rules.items()}
        choose = choose_lexemes if large_lexemes else smallest_lexemes
        return _Writer(rules, choose(rules, _ROOT, regular)).write()
    except GbnfToLarkError as error:
        raise GrammarTextError(str(error)) from None
    except (RecursionError, IndexError):
        raise GrammarTextError("is nested too deeply, or ends inside an expression") from None


def _spelt_out(node: ASTNode) -> ASTNode:
    """Return `node` with literals of one character each, and checked classes."""
    match node:
        case LiteralNode():
            return SequenceNode([LiteralNode(each) for each in characters(node.value)])
        case RegexNode():
            class_regex(node.rx)
            return node
        case RuleRefNode() | RepetitionNode() | SequenceNode() | AlternativeNode():
            return with_children(node, [_spelt_out(each) for each in node.children()])
    raise GrammarTextError(f"{type(node).__name__} is not supported")


def _with_runs(node: ASTNode, regular: set[str]) -> ASTNode:
    """Return `node` with neighbours that are regular as one sequence of their own."""
    if is_regular(node, regular):
        return node
    children = [_with_runs(child, regular) for child in node.children()]
    if isinstance(node, SequenceNode):
        runs: list[ASTNode] = []
        for is_run, group in groupby(children, lambda child: is_regular(child, regular)):
            members = [*group]
            runs += [SequenceNode(members)] if is_run else members
        children = runs
    return with_children(node, children)


class _Writer:
    """Writes rules as they are used; a part of them that is a lexeme is named in capitals."""

    def __init__(self, rules: Mapping[str, ASTNode], lexemes: set[int]) -> None:
        """Write `rules`; `lexemes` are `id` of nodes."""
        self._rules = rules
        self._lexemes = lexemes
        self._num_lexemes = 0
        self._numbers = {name: number for number, name in enumerate(rules)}
        self._lines: dict[str, str] = {}  # by name
        self._waiting: list[tuple[str, ASTNode]] = []  # to be written, by name

    def write(self) -> str:
        """Return the grammar."""
        self._waiting.append(("start", self._rules[_ROOT]))
        while self._waiting:
            name, body = self._waiting.pop()
            if name not in self._lines:
                write = self._rule if name.islower() else self._lexeme
                self._lines[name] = write(body)
        lines = (f"{name}: {text}" for name, text in self._lines.items())
        return "\n".join(["%llguidance {}", *lines])

    def _rule(self, node: ASTNode) -> str:
        if id(node) in self._lexemes:
            if isinstance(node, (LiteralNode, RegexNode)):
                return _leaf(node)
            self._num_lexemes += 1
            return self._named(f"LEXEME_{self._num_lexemes}", node)
        if isinstance(node, RuleRefNode):
            name = "start" if node.name == _ROOT else f"rule_{self._numbers[node.name]}"
            return self._named(name, self._rules[node.name])
        return _combined(node, [self._rule(child) for child in node.children()])

    def _lexeme(self, node: ASTNode) -> str:
        match node:
            case LiteralNode() | RegexNode():
                return _leaf(node)
            case RuleRefNode():
                return self._named(f"RULE_{self._numbers[node.name]}", self._rules[node.name])
        return _combined(node, [self._lexeme(child) for child in node.children()])

    def _named(self, name: str, body: ASTNode) -> str:
        self._waiting.append((name, body))
        return name


def _leaf(node: LiteralNode | RegexNode) -> str:
    if isinstance(node, LiteralNode):
        return json.dumps(node.value, ensure_ascii=False)
    return f"/{class_regex(node.rx)}/"


def _combined(node: ASTNode, parts: list[str]) -> str:
    match node:
        case RepetitionNode():
            most = "" if node.max_times is None else node.max_times
            return f"({parts[0]}){{{node.min_times},{most}}}"
        case AlternativeNode():
            return f"({' | '.join(parts)})"
    return f"({' '.join(parts)})" if parts else '""'
