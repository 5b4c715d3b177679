"""The generated text: the same for the same seed, and never with an examination question."""

from itertools import islice
from random import Random

import pytest

from engine.demo.corpus import SKILLS, documents, held_out_questions
from engine.demo.question import Question, Skill, is_held_out

_DOCUMENTS = 4000


def _training_text() -> str:
    return "\n".join(
        "".join(segment.text for segment in document)
        for document in islice(documents(0), _DOCUMENTS)
    )


def test_same_seed_gives_same_documents() -> None:
    assert list(islice(documents(3), 200)) == list(islice(documents(3), 200))
    assert list(islice(documents(3), 200)) != list(islice(documents(4), 200))


def test_same_seed_gives_same_exam() -> None:
    assert held_out_questions(1, 5) == held_out_questions(1, 5)


def test_every_category_has_held_out_questions() -> None:
    exam = held_out_questions(1, 5)
    assert all(len(questions) == 5 for questions in exam.values())
    assert all(question.held_out for questions in exam.values() for question in questions)


def test_held_out_sums_appear_in_no_form() -> None:
    text = _training_text()
    exam = held_out_questions(1, 100)
    for category in ("addition", "subtraction", "multiplication"):
        for question in exam[category]:
            assert f"{question.answer}\n" not in text
            assert f"{question.answer}<" not in text


@pytest.mark.parametrize(
    "category", ["capitals", "translations", "counting in words", "opposites", "introductions"]
)
def test_held_out_questions_are_not_asked(category: str) -> None:
    text = _training_text()
    for question in held_out_questions(1, 60)[category]:
        assert f"user\n{question.text}<" not in text
        assert f"Question: {question.text}\n" not in text


def test_held_out_pair_is_held_out_in_both_orders() -> None:
    held = next(a for a in range(100) if is_held_out("pair", a, a + 1))
    asked = {f"{held} + {held + 1} =", f"{held + 1} + {held} ="}
    text = _training_text()
    assert not any(form in text for form in asked)


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.__name__)
def test_right_answers_are_accepted_and_others_are_not(skill: Skill) -> None:
    rng = Random(5)
    for _ in range(200):
        question = skill(rng)
        assert question.text
        assert question.text[-1] != " "
        assert question.accepts(question.answer)
        assert not question.accepts("no idea")
        if question.statement is not None:
            assert all(question.statement)


def test_one_question_in_ten_is_held_out() -> None:
    share = sum(is_held_out("share", index) for index in range(5000)) / 5000
    assert share == pytest.approx(0.1, abs=0.02)


def test_a_reply_with_all_required_parts_is_accepted() -> None:
    question = Question("stories", "?", "any", held_out=True, must_contain=("fox", "sea"))
    assert question.accepts("A fox by the sea.")
    assert not question.accepts("A fox in the forest.")
