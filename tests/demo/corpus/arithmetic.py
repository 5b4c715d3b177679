"""Training questions: sums, differences, products and other questions about numbers."""

# The multiplication sign is intended.
# ruff: noqa: RUF001

from __future__ import annotations

from random import Random

from tests.demo.corpus.question import Question, is_held_out

_LARGEST_OPERAND = 99
_SMALL_OPERAND = 12
_LARGEST_FACTOR = 12
_LARGEST_NUMBER = 999

_ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a} + {b} =",
    "{a}+{b}=?",
    "{a}+{b}",
    "What's {a}+{b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "Please calculate {a} + {b}.",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
)
_SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a} - {b} =",
    "{a}-{b}=?",
    "{a}-{b}",
    "What's {a}-{b}?",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "Please calculate {a} - {b}.",
    "Take {b} away from {a}.",
)
_MULTIPLY = (
    "What is {a} x {b}?",
    "What is {a} × {b}?",
    "{a} x {b}",
    "{a} * {b} =",
    "{a}*{b}",
    "What is {a} times {b}?",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Please calculate {a} x {b}.",
)
_THINGS = ("apples", "books", "coins", "eggs", "flowers", "keys", "pears", "shells", "stamps")
_GAIN = (
    "I have {a} {things} and buy {b} more. How many {things} do I have?",
    "Anna has {a} {things}. She finds {b} more. How many {things} does she have?",
    "There are {a} {things} in a box. I put in {b} more. How many {things} are in the box?",
)
_LOSS = (
    "I have {a} {things} and lose {b}. How many {things} do I have?",
    "Tom has {a} {things}. He gives away {b}. How many {things} does he have?",
    "There are {a} {things} in a box. I take out {b}. How many {things} are in the box?",
)
_COMPARE = (
    "Which is bigger, {a} or {b}?",
    "Which number is larger: {a} or {b}?",
    "What is bigger, {a} or {b}?",
)
_PARITY = ("Is {a} even or odd?", "Is {a} an even or an odd number?", "Even or odd: {a}?")
_NEXT = ("What comes after {a}?", "Which number comes after {a}?", "What number follows {a}?")
_PREVIOUS = ("What comes before {a}?", "Which number comes before {a}?")


def _operands(rng: Random) -> tuple[int, int]:
    # Small numbers are rare among all pairs, but users ask about them first.
    limits = (_LARGEST_OPERAND, _LARGEST_OPERAND, _LARGEST_OPERAND, _SMALL_OPERAND)
    return rng.randint(0, rng.choice(limits)), rng.randint(0, rng.choice(limits))


def addition(rng: Random) -> Question:
    """``a + b`` with operands up to 99; a held-out pair is held out in both orders."""
    a, b = _operands(rng)
    return Question(
        "addition",
        rng.choice(_ADD).format(a=a, b=b),
        f"{a} + {b} = {a + b}",
        is_held_out("pair", min(a, b), max(a, b)),
        statement=(f"{a} + {b} =", f" {a + b}"),
    )


def subtraction(rng: Random) -> Question:
    """``a - b`` with ``b <= a <= 99``."""
    b, a = sorted(_operands(rng))
    return Question(
        "subtraction",
        rng.choice(_SUBTRACT).format(a=a, b=b),
        f"{a} - {b} = {a - b}",
        is_held_out("pair", b, a),
        statement=(f"{a} - {b} =", f" {a - b}"),
    )


def multiplication(rng: Random) -> Question:
    """``a x b`` up to 12 x 12.

    Only pairs with ``a < b`` are held out: the swapped pair stays in training, since products are
    memorised and cannot be inferred.
    """
    a, b = rng.randint(0, _LARGEST_FACTOR), rng.randint(0, _LARGEST_FACTOR)
    return Question(
        "multiplication",
        rng.choice(_MULTIPLY).format(a=a, b=b),
        f"{a} x {b} = {a * b}",
        a < b and is_held_out("times", a, b),
        statement=(f"{a} x {b} =", f" {a * b}"),
    )


def word_problem(rng: Random) -> Question:
    """A sum or a difference as a short story; held-out pairs are shared with both."""
    b, a = sorted(_operands(rng))
    things = rng.choice(_THINGS)
    gain = rng.random() < 0.5
    text = rng.choice(_GAIN if gain else _LOSS).format(a=a, b=b, things=things)
    sign, result = ("+", a + b) if gain else ("-", a - b)
    return Question(
        "word problems",
        text,
        f"{a} {sign} {b} = {result}, so the answer is {result} {things}.",
        is_held_out("pair", b, a),
    )


def number_sense(rng: Random) -> Question:
    """The larger of two numbers, parity, or the number before or after."""
    kind = rng.choice(("compare", "parity", "next", "previous"))
    a = rng.randint(1, _LARGEST_NUMBER if rng.random() < 0.5 else _LARGEST_OPERAND)
    if kind == "compare":
        b = rng.randint(0, _LARGEST_OPERAND)
        if a == b:
            b = a + 1
        text, answer = rng.choice(_COMPARE), f"{max(a, b)} is bigger than {min(a, b)}."
        held_out = is_held_out("compare", min(a, b), max(a, b))
        return Question("number sense", text.format(a=a, b=b), answer, held_out)
    if kind == "parity":
        text, answer = rng.choice(_PARITY), f"{a} is {'odd' if a % 2 else 'even'}."
    elif kind == "next":
        text, answer = rng.choice(_NEXT), f"{a + 1} comes after {a}."
    else:
        text, answer = rng.choice(_PREVIOUS), f"{a - 1} comes before {a}."
    return Question("number sense", text.format(a=a), answer, is_held_out(kind, a))
