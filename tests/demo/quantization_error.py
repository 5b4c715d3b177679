"""Accuracy lost by `quantization`, on the demo checkpoint or another with its tokenizer.

Run as ``python -m tests.demo.quantization_error [--checkpoint DIR] [--quantization int4]``;
``engine.demo.random_checkpoint`` creates checkpoints of other shapes, which answer no questions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from engine import LLM, SamplingParams
from engine.config.setting_types import Quantization
from engine.demo import CHECKPOINT_DIR
from engine.models.causal_lm import CausalLM
from engine.models.process_weights import WeightProcessor, check_quantization
from engine.models.registry import read_model_spec
from tests.demo.batches import batches
from tests.demo.corpus.documents import held_out_questions
from tests.demo.corpus.question import Question
from tests.demo.evaluate import messages
from tests.demo.logit_error import CPU, LogitError, load_on_cpu, logit_errors

_SEED = 2  # differs from the training text's seed
_MOST_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class AnswerError:
    """Number of equal greedy answers, and of correct ones without and with quantisation."""

    asked: int
    same: int
    right: int
    quantized_right: int


def quantization_error(
    checkpoint: Path, quantization: Quantization, text: Iterable[tuple[Tensor, Tensor]]
) -> LogitError:
    """Compare the logits of a quantised model with those of the checkpoint's, both as served."""
    plain, quantized = (_load(checkpoint, setting) for setting in (None, quantization))
    return logit_errors(quantized, [plain], text)[0]


def answer_error(
    checkpoint: Path, quantization: Quantization, questions: list[Question]
) -> AnswerError:
    """Compare greedy answers to `questions` token by token, as the engine generates them."""
    plain, quantized = (
        _answers(checkpoint, setting, questions) for setting in (None, quantization)
    )
    return AnswerError(
        asked=len(questions),
        same=sum(left[0] == right[0] for left, right in zip(plain, quantized, strict=True)),
        right=_num_right(questions, plain),
        quantized_right=_num_right(questions, quantized),
    )


def show(
    quantization: Quantization, logits: LogitError, answers: AnswerError | None, console: Console
) -> None:
    """Print the results as a table; `answers` is None if no questions were asked."""
    table = Table("", "as it is", quantization, "")
    table.add_row(
        "perplexity",
        f"{logits.perplexity:.4f}",
        f"{logits.found_perplexity:.4f}",
        f"{logits.perplexity_ratio - 1:+.2%}",
    )
    table.add_row("likeliest token is the same", "", "", f"{logits.agreement:.2%}")
    table.add_row("error of the logits", "", "", f"{logits.relative_error:.2%}")
    if answers is not None:
        asked, right, quantized_right = answers.asked, answers.right, answers.quantized_right
        table.add_row(f"right answers of {asked}", str(right), str(quantized_right), "")
        table.add_row("answers that are the same", "", "", f"{answers.same / asked:.1%}")
    console.print(table)


def _load(checkpoint: Path, quantization: Quantization | None) -> CausalLM:
    dtype = getattr(torch, read_model_spec(checkpoint).dtype)
    check_quantization(quantization, CPU, dtype)
    model = load_on_cpu(checkpoint, dtype)
    WeightProcessor(model, quantization).finish()
    return model


def _answers(
    checkpoint: Path, quantization: Quantization | None, questions: list[Question]
) -> list[tuple[list[int], str]]:
    """Return the token ids and the text of each answer."""
    llm = LLM(str(checkpoint), device="cpu", quantization=quantization)
    params = SamplingParams(temperature=0, max_tokens=_MOST_NEW_TOKENS)
    outputs = llm.chat([messages(question) for question in questions], params)
    return [(output.outputs[0].token_ids, output.outputs[0].text) for output in outputs]


def _num_right(questions: list[Question], answers: list[tuple[list[int], str]]) -> int:
    return sum(
        question.accepts(text) for question, (_, text) in zip(questions, answers, strict=True)
    )


def main(
    checkpoint: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = CHECKPOINT_DIR,
    quantization: Annotated[Quantization, typer.Option()] = "int8",
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Of 4,096 tokens of text each.")
    ] = 4,
    questions: Annotated[int, typer.Option(min=0, help="Questions per category, if any.")] = 20,
) -> None:
    """Print how a checkpoint's logits and answers change when it is quantised."""
    text = islice(batches(AutoTokenizer.from_pretrained(checkpoint), _SEED), num_batches)
    exam = held_out_questions(_SEED, questions)
    asked = [question for category in sorted(exam) for question in exam[category]]
    logits = quantization_error(checkpoint, quantization, text)
    answers = answer_error(checkpoint, quantization, asked) if asked else None
    show(quantization, logits, answers, Console())


if __name__ == "__main__":
    typer.run(main)
