"""Accuracy lost by `quantization: int8`, on the demo checkpoint or another with its tokenizer.

Run as ``python -m engine.demo.quantization_error [--checkpoint DIR] [--questions N]``;
``engine.demo.random_checkpoint`` creates checkpoints of other shapes, which answer no questions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

from engine import LLM, SamplingParams
from engine.config import Quantization
from engine.demo import CHECKPOINT_DIR
from engine.demo.batches import batches
from engine.demo.corpus import held_out_questions
from engine.demo.evaluate import messages
from engine.demo.question import Question
from engine.execution.attention.backend import attention_backend
from engine.execution.memory.kv_caches import allocate_kv_cache
from engine.models.batch import Batch
from engine.models.build import build_model
from engine.models.causal_lm import CausalLM
from engine.models.conversion import Conversion, check_quantization
from engine.models.kv_groups import KVGroups
from engine.models.registry import read_model_spec
from engine.weights import load_weights

_CPU = torch.device("cpu")
_SEED = 2  # differs from the training text's seed
_BLOCK_SIZE = 16
_MOST_NEW_TOKENS = 256


@dataclass(frozen=True, slots=True)
class LogitError:
    """Difference between the logits of a quantised model and those of the original.

    Attributes:
        perplexity: of the original model, on the labels.
        quantized_perplexity: of the quantised model.
        agreement: share of the labels where both have the same most likely token.
        relative_error: of all logits, RMS of the difference / RMS of the logits.
    """

    perplexity: float
    quantized_perplexity: float
    agreement: float
    relative_error: float


@dataclass(frozen=True, slots=True)
class AnswerError:
    """Number of equal greedy answers, and of correct ones without and with quantisation."""

    asked: int
    same: int
    right: int
    quantized_right: int


def logit_error(
    checkpoint: Path, quantization: Quantization, text: Iterable[tuple[Tensor, Tensor]]
) -> LogitError:
    """Compare the logits of every position of `text`: token ids and labels, each [rows, length].

    A label is the token itself, or negative if it is not to be predicted.
    """
    plain, quantized = _load(checkpoint, None), _load(checkpoint, quantization)
    losses = torch.zeros(2, dtype=torch.float64)
    num_predicted = num_agreed = 0
    squares = torch.zeros(2, dtype=torch.float64)
    for token_ids, labels in text:
        wanted, found = _logits(plain, token_ids), _logits(quantized, token_ids)
        squares += torch.stack([(found - wanted).square().sum(), wanted.square().sum()])
        is_predicted = labels[:, 1:] >= 0
        targets = labels[:, 1:][is_predicted]
        pair = [logits[:, :-1][is_predicted] for logits in (wanted, found)]
        losses += torch.stack([F.cross_entropy(p, targets, reduction="sum") for p in pair])
        num_agreed += int((pair[0].argmax(-1) == pair[1].argmax(-1)).sum())
        num_predicted += len(targets)
    means: list[float] = (losses / num_predicted).tolist()
    return LogitError(
        perplexity=math.exp(means[0]),
        quantized_perplexity=math.exp(means[1]),
        agreement=num_agreed / num_predicted,
        relative_error=(squares[0] / squares[1]).sqrt().item(),
    )


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


def show(logits: LogitError, answers: AnswerError | None, console: Console) -> None:
    """Print the results as a table; `answers` is None if no questions were asked."""
    table = Table("", "as it is", "int8", "")
    table.add_row(
        "perplexity",
        f"{logits.perplexity:.4f}",
        f"{logits.quantized_perplexity:.4f}",
        f"{logits.quantized_perplexity / logits.perplexity - 1:+.2%}",
    )
    table.add_row("likeliest token is the same", "", "", f"{logits.agreement:.2%}")
    table.add_row("error of the logits", "", "", f"{logits.relative_error:.2%}")
    if answers is not None:
        asked, right, quantized_right = answers.asked, answers.right, answers.quantized_right
        table.add_row(f"right answers of {asked}", str(right), str(quantized_right), "")
        table.add_row("answers that are the same", "", "", f"{answers.same / asked:.1%}")
    console.print(table)


def _load(checkpoint: Path, quantization: Quantization | None) -> CausalLM:
    config = read_model_spec(checkpoint)
    dtype = getattr(torch, config.dtype)
    check_quantization(quantization, _CPU, dtype)
    length = config.context_length
    model = build_model(config, max_model_len=length, dtype=dtype, device=_CPU)
    load_weights(model, checkpoint)
    Conversion(model, quantization).finish()
    return model


@torch.inference_mode()
def _logits(model: CausalLM, token_ids: Tensor) -> Tensor:
    """Return the logits of `token_ids` [rows, length], [rows, length, vocab_size]."""
    rows, length = token_ids.shape
    width = -(-length // _BLOCK_SIZE)
    dtype = model.model.embed_tokens.weight.dtype
    cache = allocate_kv_cache(
        1 + rows * width,
        _BLOCK_SIZE,
        groups=KVGroups.single(model.spec.num_layers),
        num_kv_heads=model.spec.num_kv_heads,
        head_dim=model.spec.head_dim,
        dtype=dtype,
        device=_CPU,
    )
    tables = 1 + torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    positions = torch.arange(length)
    blocks = tables.long()[:, positions // _BLOCK_SIZE]
    batch = Batch(
        token_ids=token_ids.flatten(),
        positions=positions.repeat(rows),
        slot_mapping=(blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE).flatten(),
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * length,
        seq_lens=torch.full((rows,), length, dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
    )
    attention = attention_backend(_CPU, dtype=dtype, block_size=_BLOCK_SIZE).plan(batch)
    return model.compute_logits(model(batch, cache, attention)).view(rows, length, -1)


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
    num_batches: Annotated[
        int, typer.Option("--batches", min=1, help="Of 4,096 tokens of text each.")
    ] = 4,
    questions: Annotated[int, typer.Option(min=0, help="Questions per category, if any.")] = 20,
) -> None:
    """Print how a checkpoint's logits and answers change when it is quantised to int8."""
    text = islice(batches(AutoTokenizer.from_pretrained(checkpoint), _SEED), num_batches)
    exam = held_out_questions(_SEED, questions)
    asked = [question for category in sorted(exam) for question in exam[category]]
    logits = logit_error(checkpoint, "int8", text)
    show(logits, answer_error(checkpoint, "int8", asked) if asked else None, Console())


if __name__ == "__main__":
    typer.run(main)
