"""Training questions: counting, times tables and repetition.

An answer that counts states its end first, so that the stopping point always appears in the same
form right before the numbers.
"""

from __future__ import annotations

from random import Random

from tests.demo.corpus.facts import EMOJI, NUMERALS
from tests.demo.corpus.question import Question, is_held_out
from tests.demo.corpus.words import COMMON_WORDS

_LARGEST = 120
_SHORTEST = 4
_LONGEST = 20
_LARGEST_FACTOR = 12

_COUNT = (
    "Count from {a} to {b}.",
    "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?",
    "Count up from {a} to {b}.",
    "Write the numbers from {a} to {b}.",
)
_COUNT_TO = ("Count to {b}.", "Please count to {b}.", "Can you count to {b}?")
_COUNT_DOWN = (
    "Count down from {a} to {b}.",
    "Count backwards from {a} to {b}.",
    "Please count down from {a} to {b}.",
    "Can you count down from {a} to {b}?",
)
_COUNT_BY = (
    "Count from {a} to {b} by {step}.",
    "Count from {a} to {b} in steps of {step}.",
    "Please count by {step} from {a} to {b}.",
)
_COUNT_IN = (
    "Count from {a} to {b} in {language}.",
    "Please count from {a} to {b} in {language}.",
    "Can you count in {language} from {a} to {b}?",
    "Count in {language} from {a} to {b}.",
)
_TABLE = (
    "Write the {n} times table.",
    "What is the {n} times table?",
    "Show me the {n} times table.",
    "Tell me the {n} times table, please.",
)
_REPEAT = (
    "Write {thing} {n} times.",
    "Say {thing} {n} times.",
    "Please write {thing} {n} times.",
    "Repeat {thing} {n} times.",
    "Can you write {thing} {n} times?",
)


def _series(first: int, last: int, step: int) -> str:
    beyond = last + (1 if step > 0 else -1)
    return ", ".join(str(number) for number in range(first, beyond, step))


def counting(rng: Random) -> Question:
    """Counting between two numbers up to 140: upwards, downwards or in steps."""
    kind = rng.choice(("up", "up", "down", "by"))
    low, length = rng.randint(0, _LARGEST), rng.randint(_SHORTEST, _LONGEST)
    if rng.random() < 0.4:
        low = rng.choice((0, 1, 1, 1, rng.randint(2, 10)))
    if kind == "by":
        step = rng.choice((2, 3, 5, 10))
        low = step * rng.randint(0, 4) if rng.random() < 0.7 else rng.randint(0, 20)
        high = low + step * min(length, 12)
        text = rng.choice(_COUNT_BY).format(a=low, b=high, step=step)
        answer = f"From {low} to {high} by {step}: {_series(low, high, step)}"
        return Question("counting", text, answer, is_held_out("by", low, high, step))
    high = low + length
    held_out = is_held_out(kind, low, high)
    if kind == "up":
        templates = (*_COUNT, *_COUNT_TO) if low == 1 else _COUNT
        text, series = rng.choice(templates).format(a=low, b=high), _series(low, high, 1)
        beginning = _series(low, low + 2, 1)
        statement = (f"{beginning},", series.removeprefix(f"{beginning},"))
        answer = f"From {low} to {high}: {series}"
        return Question("counting", text, answer, held_out, statement=statement)
    text = rng.choice(_COUNT_DOWN).format(a=high, b=low)
    answer = f"From {high} to {low}: {_series(high, low, -1)}"
    return Question("counting", text, answer, held_out)


def counting_in_words(rng: Random) -> Question:
    """Counting up to twenty in number words of several languages, also Chinese and Japanese."""
    language = rng.choice(tuple(NUMERALS))
    first = 1 if rng.random() < 0.4 else rng.randint(1, 15)
    last = rng.randint(first + 2, 20)
    # In English plain "count from 1 to 5" means digits, so words are requested explicitly.
    name = "English words" if language == "English" else language
    between = "、" if language in ("Chinese", "Japanese") else ", "
    words = NUMERALS[language][first - 1 : last]
    return Question(
        "counting in words",
        rng.choice(_COUNT_IN).format(a=first, b=last, language=name),
        f"{words[0]} → {words[-1]}: {between.join(words)}",
        is_held_out("words", language, first, last),
    )


def times_table(rng: Random) -> Question:
    """The first ten multiples of a number.

    They are written without factors: a line such as "3 x 8 = 24" would reveal a product that
    ``arithmetic.multiplication`` holds out.
    """
    n, template = rng.randint(1, _LARGEST_FACTOR), rng.choice(_TABLE)
    answer = f"The {n} times table: {_series(n, 10 * n, n)}."
    return Question("times tables", template.format(n=n), answer, is_held_out(n, template))


def repetition(rng: Random) -> Question:
    """An emoji or a word repeated two to ten times."""
    thing = rng.choice(tuple(EMOJI.values()) if rng.random() < 0.6 else COMMON_WORDS)
    n = rng.randint(2, 10)
    return Question(
        "repetition",
        rng.choice(_REPEAT).format(thing=thing, n=n),
        " ".join([thing] * n),
        is_held_out("repeat", thing, n),
    )
