"""The demo model keeps its abilities in int8, and the command that measures this is right."""

from itertools import islice

import pytest
import torch
from rich.console import Console
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.demo import CHECKPOINT_DIR
from tests.demo.batches import batches
from tests.demo.corpus.documents import held_out_questions
from tests.demo.quantization_error import answer_error, quantization_error, show
from tests.factories.forms import quantizes

pytestmark = pytest.mark.skipif(
    not quantizes(torch.bfloat16), reason="this CPU has no exact int8 products"
)


@pytest.fixture(scope="module")
def text() -> list[tuple[Tensor, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_DIR)
    # Rows of odd length: the last block of each is partly filled.
    return [(ids[:4, :125], labels[:4, :125]) for ids, labels in islice(batches(tokenizer, 3), 2)]


@torch.inference_mode()
def test_logits_of_the_demo_model(text: list[tuple[Tensor, Tensor]]) -> None:
    found = quantization_error(CHECKPOINT_DIR, "int8", text)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR, dtype=torch.float32).eval()
    ids, labels = (torch.cat(tensors) for tensors in zip(*text, strict=True))
    perplexity = model(input_ids=ids, labels=labels).loss.exp().item()
    assert found.perplexity == pytest.approx(perplexity, rel=0.005)
    assert found.found_perplexity == pytest.approx(perplexity, rel=0.02)
    assert found.found_perplexity != found.perplexity
    assert 0.99 <= found.agreement <= 1
    # 1.3 % of each of the products (see the tests of int8 projections), in a residual stream.
    assert 0.005 < found.relative_error < 0.05


def test_answers_of_the_demo_model() -> None:
    exam = held_out_questions(4, 1)
    questions = [question for category in sorted(exam) for question in exam[category]]
    found = answer_error(CHECKPOINT_DIR, "int8", questions)
    assert found.asked == len(questions) > 15
    assert found.right >= 0.8 * found.asked
    assert abs(found.quantized_right - found.right) <= 0.1 * found.asked
    assert found.same >= 0.8 * found.asked


def test_the_table(text: list[tuple[Tensor, Tensor]]) -> None:
    questions = next(iter(held_out_questions(4, 1).values()))
    console = Console(record=True, width=100)
    logits = quantization_error(CHECKPOINT_DIR, "int8", text[:1])
    show("int8", logits, answer_error(CHECKPOINT_DIR, "int8", questions), console)
    printed = console.export_text()
    assert f"{logits.found_perplexity:.4f}" in printed
    assert f"{logits.agreement:.2%}" in printed
    assert "right answers of 1" in printed
    show("int8", logits, None, console)
    assert "answers" not in console.export_text()
