"""The generated text: the same for the same seed, and never with an examination question."""

import re
from itertools import islice
from random import Random

import pytest

from tests.demo.corpus.documents import SKILLS, documents, held_out_questions
from tests.demo.corpus.question import Question, Skill, is_held_out

_DOCUMENTS = 4000


@pytest.fixture(scope="module")
def training_text() -> str:
    sample = islice(documents(0), _DOCUMENTS)
    return "\n".join("".join(segment.text for segment in document) for document in sample)


@pytest.fixture(scope="module")
def exam() -> dict[str, list[Question]]:
    return held_out_questions(1, 40)


def test_same_seed_gives_same_documents() -> None:
    assert list(islice(documents(3), 200)) == list(islice(documents(3), 200))
    assert list(islice(documents(3), 200)) != list(islice(documents(4), 200))


def test_same_seed_gives_same_exam() -> None:
    assert held_out_questions(1, 5) == held_out_questions(1, 5)


def test_every_category_has_held_out_questions(exam: dict[str, list[Question]]) -> None:
    assert len(exam) >= len(SKILLS)
    assert all(exam.values())
    assert all(question.held_out for questions in exam.values() for question in questions)


@pytest.mark.parametrize("category", ["addition", "subtraction", "multiplication"])
def test_held_out_sums_appear_in_no_form(
    training_text: str, exam: dict[str, list[Question]], category: str
) -> None:
    shown = set(re.findall(r"\d+ [-+x] \d+ = \d+", training_text))
    assert len(shown) > 100
    assert shown.isdisjoint(question.answer for question in exam[category])


def test_held_out_pair_is_held_out_in_both_orders(training_text: str) -> None:
    shown = set(re.findall(r"(\d+) \+ (\d+)", training_text))
    assert len(shown) > 100
    pairs = [sorted((int(a), int(b))) for a, b in shown]
    assert not any(is_held_out("pair", low, high) for low, high in pairs)


def test_held_out_questions_are_not_asked(
    training_text: str, exam: dict[str, list[Question]]
) -> None:
    asked = set(re.findall(r"user\n(.+)<\|im_end", training_text))
    asked |= set(re.findall(r"^(?:Question: )?(.+)$", training_text, re.MULTILINE))
    # A memory question is held out together with what was said before it, and a story by its
    # hero and place, which not every request for one names.
    alone = [q for questions in exam.values() for q in questions if not q.history]
    assert len(asked) > 1000
    assert asked.isdisjoint(q.text for q in alone if q.category != "stories")


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
