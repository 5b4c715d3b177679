"""What holds for the tests of the engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.execution.memory import kv_cache_plan
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

# The models are tiny: threads would spend their time waiting for each other.
torch.set_num_threads(1)


@pytest.fixture(params=[1, 3], ids="{0} threads".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many threads torch's operations get: one, and more than share the work evenly."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with 400 tokens and a byte-level tokenizer; tests only read it."""
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, vocab_size=400, eos_token_id=0)
    return save_tokenizer(byte_level_tokenizer(), path)


@pytest.fixture
def checkpoints_at_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """States may be kept at the end of each KV block: the tests' prompts are short."""
    monkeypatch.setattr(kv_cache_plan, "_LEAST_INTERVAL", 1)
