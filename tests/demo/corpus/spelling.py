"""Training questions: spelling words, counting their letters and copying them."""

from __future__ import annotations

from random import Random

from tests.demo.corpus.question import Question, is_held_out
from tests.demo.corpus.words import COMMON_WORDS, invented_word

_SPELL = (
    "Spell {word}.",
    "Spell the word {word}.",
    'Spell "{word}".',
    'Spell the word "{word}".',
    "How do you spell {word}?",
    'How do you spell "{word}"?',
    "How is {word} spelled?",
    "Can you spell {word}?",
)
_LENGTH = (
    "How many letters are in {word}?",
    'How many letters are in "{word}"?',
    "How many letters does {word} have?",
    "Count the letters of {word}.",
)
_COPY = ("Repeat after me: {words}", "Say: {words}", "Copy this: {words}", "Write: {words}")


def _word(rng: Random) -> str:
    return rng.choice(COMMON_WORDS) if rng.random() < 0.4 else invented_word(rng)


def spelling(rng: Random) -> Question:
    """A word letter by letter, or its number of letters; both hold out the same words."""
    word = _word(rng)
    letters = "-".join(word)
    held_out = is_held_out("spell", word)
    if rng.random() < 0.25:
        text, answer = rng.choice(_LENGTH), f"{letters}: {len(word)} letters."
        return Question("letters in a word", text.format(word=word), answer, held_out)
    return Question("spelling", rng.choice(_SPELL).format(word=word), letters, held_out)


def copying(rng: Random) -> Question:
    """Two to six words to repeat."""
    words = " ".join(_word(rng) for _ in range(rng.randint(2, 6)))
    return Question(
        "copying", rng.choice(_COPY).format(words=words), words, is_held_out("copy", words)
    )
