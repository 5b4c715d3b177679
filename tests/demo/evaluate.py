"""Accuracy of a demo checkpoint on held-out questions.

Run as ``python -m tests.demo.evaluate [--checkpoint DIR] [--questions N]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import CHECKPOINT_DIR
from tests.demo.corpus.documents import held_out_questions
from tests.demo.corpus.question import Question

_SEED = 1
_BATCH = 50
_MOST_NEW_TOKENS = 256


@dataclass(frozen=True)
class Score:
    """Number of questions asked and answered correctly, with the first wrong answer."""

    asked: int
    right: int
    mistake: tuple[str, str] | None

    @property
    def accuracy(self) -> float:
        """The share of correct answers, 0 to 1."""
        return self.right / self.asked


def answers(model: Any, tokenizer: Any, questions: Sequence[Question]) -> list[str | None]:
    """The model's greedy answer to each question, or None if it did not end."""
    prompts = [
        tokenizer.apply_chat_template(
            messages(question), tokenize=False, add_generation_prompt=True
        )
        for question in questions
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            max_new_tokens=_MOST_NEW_TOKENS,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    replies = output[:, inputs["input_ids"].shape[1] :]
    stops = torch.tensor(model.generation_config.eos_token_id)
    ended = torch.isin(replies, stops).any(dim=1).tolist()
    texts = tokenizer.batch_decode(replies, skip_special_tokens=True)
    return [text if end else None for text, end in zip(texts, ended, strict=True)]


def measure(checkpoint: Path, per_category: int, console: Console) -> dict[str, Score]:
    """The score of each category on ``per_category`` held-out questions, in float32.

    Raises OSError if ``checkpoint`` is not a model folder.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    exam = held_out_questions(_SEED, per_category)
    questions = [question for category in sorted(exam) for question in exam[category]]
    given: list[str | None] = []
    for start in track(range(0, len(questions), _BATCH), "Examining", console=console):
        given += answers(model, tokenizer, questions[start : start + _BATCH])
    marked: dict[str, list[tuple[Question, str | None]]] = {
        category: [] for category in sorted(exam)
    }
    for question, answer in zip(questions, given, strict=True):
        marked[question.category].append((question, answer))
    return {category: _score(pairs) for category, pairs in marked.items()}


def _score(pairs: Sequence[tuple[Question, str | None]]) -> Score:
    wrong = [
        (question.text, answer or "(no end)")
        for question, answer in pairs
        if answer is None or not question.accepts(answer)
    ]
    return Score(len(pairs), len(pairs) - len(wrong), wrong[0] if wrong else None)


def overall(scores: dict[str, Score]) -> Score:
    """The sum of all categories."""
    asked = sum(score.asked for score in scores.values())
    return Score(asked, sum(score.right for score in scores.values()), None)


def show(scores: dict[str, Score], console: Console) -> None:
    """Print the scores as a table, each with an example of a mistake."""
    table = Table("category", "asked", "right", "accuracy", "a mistake")
    for category, score in [*scores.items(), ("all", overall(scores))]:
        mistake = " → ".join(score.mistake) if score.mistake else ""
        shown = mistake if len(mistake) <= 80 else f"{mistake[:79]}…"
        table.add_row(category, str(score.asked), str(score.right), f"{score.accuracy:.1%}", shown)
    console.print(table)


def messages(question: Question) -> list[dict[str, str]]:
    """The chat messages that ask a question."""
    turns: list[dict[str, str]] = []
    for text, answer in question.history:
        turns.append({"role": "user", "content": text})
        turns.append({"role": "assistant", "content": answer})
    return [*turns, {"role": "user", "content": question.text}]


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT_DIR,
    questions: Annotated[int, typer.Option(min=1, help="Questions per category.")] = 100,
) -> None:
    """Print the checkpoint's accuracy on held-out questions, per category."""
    console = Console()
    show(measure(checkpoint, questions, console), console)


if __name__ == "__main__":
    typer.run(main)
