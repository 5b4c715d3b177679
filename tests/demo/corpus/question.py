"""A question with its correct answer, and the rule that holds out some questions from training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

_HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Question:
    """One question, its answer, and whether it may be used for training.

    ``history`` holds the earlier (question, answer) turns of the same chat. ``must_contain``, if
    given, replaces the comparison with ``answer``: any reply with all of these strings is correct
    (for stories, which have many answers). ``statement`` is the same content as plain text, as a
    beginning and the continuation to learn.
    """

    category: str
    text: str
    answer: str
    held_out: bool
    history: tuple[tuple[str, str], ...] = ()
    must_contain: tuple[str, ...] = ()
    statement: tuple[str, str] | None = None

    def accepts(self, reply: str) -> bool:
        """Whether ``reply`` is correct."""
        if self.must_contain:
            return all(part in reply for part in self.must_contain)
        return reply.strip() == self.answer


Skill = Callable[[Random], Question]
"""Draws one random question of its kind; some of those it draws are held out."""


def is_held_out(*key: object) -> bool:
    """Whether the question identified by ``key`` is held out of training (one in ten is).

    A digest of the key decides, so the split depends neither on the seed nor on the order of
    drawing: a question is on the same side in every run.
    """
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % _HELD_OUT_ONE_IN == 0


def with_article(noun: str) -> str:
    """``noun`` after "a" or "an", by its first letter."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
