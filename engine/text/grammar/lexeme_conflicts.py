"""Places: the position automaton of lexemes, and which of them a greedy lexer would confuse."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import or_

# Beyond these, finding out takes too long.
_MAX_PLACES = 5000
_MAX_STATES = 2000


class TooManyStatesError(Exception):
    """Lexemes are too large to be compared."""


class Places:
    """The characters of the lexemes that may be next to each other: Glushkov's construction.

    Sets of places, of characters and of lexemes are integers with a bit for each member.
    """

    def __init__(self) -> None:
        """Start without lexemes."""
        self._symbols: list[int] = []  # the characters at each place
        self._lexemes: list[int] = []  # the lexeme of each place
        self._next: list[int] = []  # the places after each place
        self._begins = 0
        self._ends = 0

    def add(self, symbols: int, lexeme: int) -> int:
        """Add a place for one of `symbols` to a lexeme; return the set of it alone.

        Raises:
            TooManyStatesError: there are too many.
        """
        if len(self._symbols) == _MAX_PLACES:
            raise TooManyStatesError
        self._symbols.append(symbols)
        self._lexemes.append(lexeme)
        self._next.append(0)
        return 1 << (len(self._symbols) - 1)

    def join(self, ends: int, begins: int) -> None:
        """Let each of the places `begins` come after each of `ends`."""
        for place in _members(ends):
            self._next[place] |= begins

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
        waiting = [self._begins & places for _, places in by_symbol]
        while waiting:
            state = waiting.pop()
            if not state or state in seen:
                continue
            seen.add(state)
            if len(seen) > _MAX_STATES:
                raise TooManyStatesError
            following = _union(self._next[place] for place in _members(state))
            ended = {self._lexemes[place] for place in _members(state & self._ends)}
            for symbols, places in by_symbol:
                if goes_on := following & places:
                    waiting.append(goes_on)
                    cut = {lexeme for lexeme in ended if after[lexeme] & symbols}
                    if cut:
                        found |= cut | {self._lexemes[place] for place in _members(goes_on)}
        return found

    def _by_symbol(self) -> list[tuple[int, int]]:
        """Return sets of characters that no place tells apart, and the places of each."""
        places_of: dict[int, int] = {}  # by the characters at them
        for place, symbols in enumerate(self._symbols):
            places_of[symbols] = places_of.get(symbols, 0) | 1 << place
        classes: dict[int, int] = {}
        for symbol in _members(_union(places_of)):
            bit = 1 << symbol
            places = _union(places for symbols, places in places_of.items() if symbols & bit)
            classes[places] = classes.get(places, 0) | bit
        return [(symbols, places) for places, symbols in classes.items()]


def _union(sets: Iterable[int]) -> int:
    return reduce(or_, sets, 0)


def _members(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
