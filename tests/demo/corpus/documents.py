"""The generated text: training documents and held-out questions.

A question is either for training or held out by construction (see ``question.is_held_out``), so
the model never sees a held-out question in training, in any form.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.demo.corpus import arithmetic, counting, knowledge, spelling, stories, talk
from tests.demo.corpus.question import Question, Skill
from tests.demo.tokenizer import END_OF_TEXT, TURN_CLOSING, turn_opening

# Relative weight of each skill: harder ones are drawn more often.
SKILLS: dict[Skill, float] = {
    arithmetic.addition: 11,
    arithmetic.subtraction: 11,
    arithmetic.multiplication: 7,
    arithmetic.word_problem: 5,
    arithmetic.number_sense: 5,
    counting.counting: 10,
    counting.counting_in_words: 5,
    counting.times_table: 1,
    counting.repetition: 6,
    spelling.spelling: 11,
    spelling.copying: 5,
    knowledge.capital: 4,
    knowledge.colour: 2,
    knowledge.opposite: 3,
    knowledge.animal: 4,
    knowledge.emoji: 3,
    knowledge.translation: 7,
    knowledge.listing: 2,
    knowledge.introduction: 1,
    talk.greeting: 4,
    talk.memory: 2,
    talk.unknown: 2,
    stories.story: 4,
}

_SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Trident, a helpful demo model.",
    "Answer briefly and kindly.",
    "You are a friendly assistant. Answer the question.",
)
_PLAIN_SHARE = 0.2
_SYSTEM_SHARE = 0.2
_ONE_TURN_SHARE = 0.55
_MOST_TURNS = 8
_CARELESS_SHARE = 0.08


@dataclass(frozen=True)
class Segment:
    """A piece of a document, and whether it is part of the training loss."""

    text: str
    learned: bool


Document = tuple[Segment, ...]


def documents(seed: int) -> Iterator[Document]:
    """An endless stream of training documents, determined by ``seed``."""
    rng = Random(seed)
    while True:
        if rng.random() < _PLAIN_SHARE:
            yield _plain_text(rng)
        else:
            yield _chat(rng)


def held_out_questions(seed: int, per_category: int) -> dict[str, list[Question]]:
    """Distinct held-out questions: ``per_category`` of each category.

    A category with fewer of them returns those found in a long search.
    """
    rng = Random(seed)
    found: dict[str, dict[tuple[object, ...], Question]] = {}
    for skill in SKILLS:
        for _ in range(150 * per_category):
            question = skill(rng)
            category = found.setdefault(question.category, {})
            if question.held_out and len(category) < per_category:
                category.setdefault((question.text, question.history), question)
    return {category: list(questions.values()) for category, questions in found.items()}


def _draw(rng: Random) -> Question:
    """A training question of a random skill."""
    skill = rng.choices(tuple(SKILLS), tuple(SKILLS.values()))[0]
    while (question := skill(rng)).held_out:
        pass
    return question


def _plain_text(rng: Random) -> Document:
    """Text without chat turns, for prompts without a chat template."""
    question = _draw(rng)
    style = rng.random()
    if question.statement is not None and style < 0.6:
        beginning, end = question.statement
    elif style < 0.8:
        beginning, end = question.text, f"\n{question.answer}"
    else:
        beginning, end = f"Question: {question.text}\nAnswer:", f" {question.answer}"
    return Segment(beginning, learned=False), Segment(f"{end}{END_OF_TEXT}", learned=True)


def _chat(rng: Random) -> Document:
    """A chat of one or several turns; its answers are the training target."""
    segments: list[Segment] = []
    if rng.random() < _SYSTEM_SHARE:
        message = rng.choice(_SYSTEM_MESSAGES)
        segments.append(Segment(f"{turn_opening('system')}{message}{TURN_CLOSING}", learned=False))
    turns = 1 if rng.random() < _ONE_TURN_SHARE else rng.randint(2, _MOST_TURNS)
    for _ in range(turns):
        question = _draw(rng)
        asked = (*question.history, (_careless(rng, question.text), question.answer))
        for text, answer in asked:
            opening = f"{turn_opening('user')}{text}{TURN_CLOSING}{turn_opening('assistant')}"
            segments.append(Segment(opening, learned=False))
            segments.append(Segment(f"{answer}{TURN_CLOSING}", learned=True))
    return tuple(segments)


def _careless(rng: Random, text: str) -> str:
    """``text`` as people type it: sometimes without a capital or the final punctuation.

    An exclamation mark stays: "Hello" and "Hello!" are two greetings, either may be held out.
    """
    if rng.random() < _CARELESS_SHARE:
        text = text[0].lower() + text[1:]
    if rng.random() < _CARELESS_SHARE:
        text = text.rstrip("?.") or text
    return text
