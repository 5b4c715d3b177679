"""The training script, on a model and a number of steps that take seconds."""

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.demo.batches import TOKENS_PER_BATCH, batches
from tests.demo.tokenizer import stop_token_ids, train_tokenizer
from tests.demo.train import main


@pytest.fixture
def one_thread() -> Iterator[int]:
    """A thread count for the script, which sets it for the whole process."""
    before = torch.get_num_threads()
    yield 1
    torch.set_num_threads(before)


def test_a_short_run_writes_a_complete_checkpoint(tmp_path: Path, one_thread: int) -> None:
    folder = tmp_path / "checkpoint"
    main(output=folder, steps=2, hidden_size=64, layers=1, questions=1, threads=one_thread, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == stop_token_ids(tokenizer)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| addition | 1 |" in card


def test_batches_are_reproducible_and_learn_answers_only() -> None:
    tokenizer = train_tokenizer(["What is the capital of France?"] * 10, 300, 2048)
    first, again = (list(islice(batches(tokenizer, 0), 4)) for _ in range(2))
    for (ids, labels), (same_ids, same_labels) in zip(first, again, strict=True):
        assert torch.equal(ids, same_ids)
        assert torch.equal(labels, same_labels)
        assert ids.shape == labels.shape
        assert ids.numel() == TOKENS_PER_BATCH
        learned = labels != -100
        assert torch.equal(ids[learned], labels[learned])
        assert 0 < int(learned.sum()) < ids.numel()


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, engine.demo, engine.demo.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
