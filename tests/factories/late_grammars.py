"""Grammars that follow their tokens late, by a fixed pattern, in no thread."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from engine.core.constraints.mask_workers import Drawn, MaskWorkers


class FollowedGrammar:
    """Allows everything; notes what it has followed, ahead of the sequence by one token at most."""

    def __init__(self) -> None:
        self.followed: list[int] = []
        self._ahead: int | None = None

    def needs_advance(self, token_id: int) -> bool:
        return self._ahead != token_id

    def advance(self, token_id: int) -> None:
        self._ahead = token_id

    def take(self, token_id: int) -> bool:
        assert self._ahead == token_id, "the sequence goes on without its grammar"
        self.followed.append(token_id)
        self._ahead = None
        return False

    def check_stop(self, token_id: int) -> None:
        pass

    def forced(self) -> list[int]:
        return []


class LateWorkers(MaskWorkers):
    """Advances a grammar when a step waits for it, or some steps later.

    Attributes:
        num_late: tokens that no step has waited for.
    """

    def __init__(self, is_late: Sequence[bool]) -> None:
        """Decide by `is_late`, over and over; one of them at least must be false."""
        assert not all(is_late)
        self._is_late = cycle(is_late)
        self._drawn: list[Drawn] = []
        self.num_late = 0

    def begin(self, drawn: Sequence[Drawn]) -> None:
        self._drawn += drawn

    def wait(self) -> None:
        drawn, self._drawn = self._drawn, []
        for each in drawn:
            if next(self._is_late):
                self._drawn.append(each)
                self.num_late += 1
            elif each.is_wanted():
                each.grammar.advance(each.token_id)

    def wait_for_any(self, timeout_s: float) -> None:
        self.wait()
