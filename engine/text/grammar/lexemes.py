"""Chooses the parts of a grammar in EBNF that its lexer matches as regular expressions: lexemes.

The larger they are, the less the parser has to do for each token. But llguidance's lexer takes the
longest match of all lexemes that may come next, and does not go back to a shorter one. Parts are
lexemes only if that excludes no text: where one may end, no character that may come after it goes
on with it, or with another one that begins alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    LiteralNode,
    RegexNode,
    RepetitionNode,
    RuleRefNode,
    SequenceNode,
)

from engine.text.grammar.ebnf_characters import class_symbols, symbol_of

Rules = Mapping[str, ASTNode]

_MAX_NESTING = 50  # of rules

# Beyond these, finding out takes too long.
_MAX_POSITIONS = 5000
_MAX_STATES = 2000


class TooManyStatesError(Exception):
    """Lexemes are too large to be compared."""


class Positions:
    """The characters of the lexemes that may be next to each other: Glushkov's construction.

    Sets of positions, of characters and of lexemes are integers with a bit for each member.
    """

    def __init__(self) -> None:
        """Start without lexemes."""
        self._symbols: list[int] = []  # the characters at each position
        self._lexemes: list[int] = []  # the lexeme of each position
        self._next: list[int] = []  # the positions after each position
        self._begins = 0
        self._ends = 0

    def add(self, symbols: int, lexeme: int) -> int:
        """Add a place for one of `symbols` to a lexeme; return the set of it alone.

        Raises:
            TooManyStatesError: there are too many.
        """
        if len(self._symbols) == _MAX_POSITIONS:
            raise TooManyStatesError
        self._symbols.append(symbols)
        self._lexemes.append(lexeme)
        self._next.append(0)
        return 1 << (len(self._symbols) - 1)

    def join(self, ends: int, begins: int) -> None:
        """Let each of the positions `begins` come after each of `ends`."""
        for position in _members(ends):
            self._next[position] |= begins

    def enclose(self, begins: int, ends: int) -> None:
        """Note where a lexeme may begin, and where it may end."""
        self._begins |= begins
        self._ends |= ends

    def conflicts(self, after: Sequence[int]) -> set[int]:
        """Return the lexemes of which the longest match would exclude texts.

        Two are compared even if the grammar never allows both at once. `after` are the characters
        that may come after each lexeme.

        Raises:
            TooManyStatesError: as from `add`.
        """
        by_symbol = self._by_symbol()
        found: set[int] = set()
        seen: set[int] = set()
        waiting = [self._begins & positions for _, positions in by_symbol]
        while waiting:
            state = waiting.pop()
            if not state or state in seen:
                continue
            seen.add(state)
            if len(seen) > _MAX_STATES:
                raise TooManyStatesError
            following = _union(self._next[position] for position in _members(state))
            ended = {self._lexemes[position] for position in _members(state & self._ends)}
            for symbols, positions in by_symbol:
                if goes_on := following & positions:
                    waiting.append(goes_on)
                    cut = {lexeme for lexeme in ended if after[lexeme] & symbols}
                    if cut:
                        found |= cut | {self._lexemes[position] for position in _members(goes_on)}
        return found

    def _by_symbol(self) -> list[tuple[int, int]]:
        """Return sets of characters that no position distinguishes, and the positions of each."""
        positions_of: dict[int, int] = {}  # by the characters at them
        for position, symbols in enumerate(self._symbols):
            positions_of[symbols] = positions_of.get(symbols, 0) | 1 << position
        classes: dict[int, int] = {}
        for symbol in _members(_union(positions_of)):
            bit = 1 << symbol
            positions = _union(
                positions for symbols, positions in positions_of.items() if symbols & bit
            )
            classes[positions] = classes.get(positions, 0) | bit
        return [(symbols, positions) for positions, symbols in classes.items()]


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low


def used_rules(rules: Rules, root: str) -> dict[str, ASTNode]:
    """Return the rules that `root` needs, each after those that it refers to.

    So one round through them brings all there is to know of a rule to those that refer to it; only
    rules that refer to themselves need more.
    """
    used: dict[str, ASTNode] = {}
    seen = {root}
    waiting = [(root, iter(references(rules[root])))]
    while waiting:
        name, others = waiting[-1]
        for other in others:
            if other not in seen:
                seen.add(other)
                waiting.append((other, iter(references(rules[other]))))
                break
        else:
            used[name] = rules[name]
            waiting.pop()
    return used


def regular_rules(rules: Rules) -> set[str]:
    """Return the rules that refer neither to themselves nor to one that does.

    Those that nest very deeply are left out: llguidance has no stack for such expressions.
    """
    waiting = {name: set(references(body)) for name, body in rules.items()}
    regular: set[str] = set()
    for _ in range(_MAX_NESTING):
        regular |= {name for name, others in waiting.items() if others <= regular}
        waiting = {name: others for name, others in waiting.items() if name not in regular}
    return regular


def is_regular(node: ASTNode, regular: Collection[str]) -> bool:
    """Whether `node` refers to `regular` rules alone."""
    return all(name in regular for name in references(node))


def choose_lexemes(rules: Rules, root: str, regular: Collection[str]) -> set[int]:
    """Return the `id` of each node that is a lexeme, of the rules that `root` uses.

    Literals in `rules`, which are `used_rules`, must have one character each: that may always be a
    lexeme.
    """
    after = _Neighbours(rules).after
    split: set[int] = set()

    def is_wanted(node: ASTNode) -> bool:
        return _is_leaf(node) or (id(node) not in split and is_regular(node, regular))

    while True:
        lexemes = _outermost(rules, root, is_wanted)
        followers = [after[id(lexeme)] for lexeme in lexemes]
        positions = Positions()
        try:
            for number, lexeme in enumerate(lexemes if any(followers) else []):
                _add(rules, lexeme, positions, number)
            conflicts = positions.conflicts(followers)
        except (TooManyStatesError, RecursionError):
            return smallest_lexemes(rules, root, regular)
        if not conflicts:
            return set(map(id, lexemes))
        split.update(id(lexemes[number]) for number in conflicts)  # one of them is no character


def smallest_lexemes(rules: Rules, root: str, regular: Collection[str]) -> set[int]:
    """Return the same, if each character is a lexeme."""
    return set(map(id, _outermost(rules, root, _is_leaf)))


def _outermost(rules: Rules, root: str, is_wanted: Callable[[ASTNode], bool]) -> list[ASTNode]:
    """Return the largest parts of the rules in use that are wanted."""
    found, seen, waiting = [], {root}, [rules[root]]
    while waiting:
        node = waiting.pop()
        if is_wanted(node):
            found.append(node)
        elif isinstance(node, RuleRefNode):
            if node.name not in seen:
                seen.add(node.name)
                waiting.append(rules[node.name])
        else:
            waiting += node.children()
    return found


def _add(rules: Rules, node: ASTNode, positions: Positions, number: int) -> None:
    """Add the positions of lexeme `number` to those of the others."""

    def build(node: ASTNode) -> tuple[bool, int, int]:
        """Return whether it may be empty, and the positions where it may begin and end."""
        if _is_leaf(node):
            position = positions.add(_symbols(node), number)
            return False, position, position
        if isinstance(node, RuleRefNode):
            return build(rules[node.name])
        if isinstance(node, RepetitionNode):
            if node.max_times == 0:
                return True, 0, 0
            is_empty, begins, ends = build(node.node)
            if node.max_times != 1:  # as if without limit: more may follow than can
                positions.join(ends, begins)
            return is_empty or not node.min_times, begins, ends
        is_sequence = isinstance(node, SequenceNode)
        is_empty, begins, ends = is_sequence, 0, 0
        for part_is_empty, part_begins, part_ends in map(build, node.children()):
            if is_sequence:
                positions.join(ends, part_begins)
                begins |= part_begins if is_empty else 0
                ends = part_ends | (ends if part_is_empty else 0)
                is_empty = is_empty and part_is_empty
            else:
                is_empty, begins, ends = (
                    is_empty or part_is_empty,
                    begins | part_begins,
                    ends | part_ends,
                )
        return is_empty, begins, ends

    _, begins, ends = build(node)
    positions.enclose(begins, ends)


class _Neighbours:
    """The characters that may come after each node, in any of its uses.

    Attributes:
        after: sets of characters, by `id` of the node.
    """

    def __init__(self, rules: Rules) -> None:
        """Find them: least fixed points."""
        # Of each rule, whether it may be empty, and the characters that it may begin with.
        self._begins = dict.fromkeys(rules, (False, 0))
        known: object = None
        while known != self._begins:
            known = dict(self._begins)
            for name in rules:
                self._begins[name] = self._begin(rules[name])
        self._after_rule = dict.fromkeys(rules, 0)
        self.after: dict[int, int] = {}
        while known != self._after_rule:
            known = dict(self._after_rule)
            for name in reversed([*rules]):
                self._visit(rules[name], self._after_rule[name])

    def _begin(self, node: ASTNode) -> tuple[bool, int]:
        if _is_leaf(node):
            return False, _symbols(node)
        if isinstance(node, RuleRefNode):
            return self._begins[node.name]
        if isinstance(node, RepetitionNode):
            is_empty, symbols = self._begin(node.node)
            return is_empty or not node.min_times, symbols
        is_sequence = isinstance(node, SequenceNode)
        found = 0
        for is_empty, symbols in map(self._begin, node.children()):
            found |= symbols
            if is_sequence and not is_empty:
                return False, found
        return is_sequence or any(self._begin(child)[0] for child in node.children()), found

    def _visit(self, node: ASTNode, after: int) -> None:
        self.after[id(node)] = self.after.get(id(node), 0) | after
        if isinstance(node, RuleRefNode):
            self._after_rule[node.name] |= after
        elif isinstance(node, RepetitionNode):
            is_repeated = node.max_times != 1
            self._visit(node.node, after | (self._begin(node.node)[1] if is_repeated else 0))
        else:
            for child in reversed(node.children()):
                self._visit(child, after)
                if isinstance(node, SequenceNode):
                    is_empty, symbols = self._begin(child)
                    after = symbols | (after if is_empty else 0)


def references(node: ASTNode) -> list[str]:
    found, waiting = [], [node]
    while waiting:
        each = waiting.pop()
        if isinstance(each, RuleRefNode):
            found.append(each.name)
        waiting += each.children()
    return found


def with_children(node: ASTNode, children: list[ASTNode]) -> ASTNode:
    """Return a node as `node`, with other children; itself if it can have none."""
    match node:
        case RepetitionNode():
            return RepetitionNode(children[0], node.min_times, node.max_times)
        case AlternativeNode():
            return AlternativeNode(children)
        case SequenceNode():
            return SequenceNode(children)
    return node


def _is_leaf(node: ASTNode) -> bool:
    return isinstance(node, (LiteralNode, RegexNode))


def _symbols(leaf: ASTNode) -> int:
    if isinstance(leaf, LiteralNode):
        return symbol_of(leaf.value)
    assert isinstance(leaf, RegexNode)
    return class_symbols(leaf.rx)
