"""The server under test: the real one, on a small random checkpoint with long answers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.launch.server import TritonServer
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

MAX_MODEL_LEN = 4096  # so that a request still runs when something happens to it
START_TIMEOUT_S = 120.0


@contextmanager
def checkpoint(max_model_len: int = MAX_MODEL_LEN) -> Iterator[Path]:
    """Write a temporary seeded checkpoint, whose tokenizer splits characters."""
    with tempfile.TemporaryDirectory(prefix="resilience-") as folder:
        tokenizer = byte_level_tokenizer()
        write_checkpoint(
            Path(folder),
            vocab_size=len(tokenizer),
            max_position_embeddings=max_model_len,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
        )
        yield save_tokenizer(tokenizer, Path(folder))


@contextmanager
def serving(repository: Path | None = None, **settings: Any) -> Iterator[TritonServer]:
    """Run a server with `settings` of the engine, on Trident's model repository or another one."""
    with (
        checkpoint() as model,
        TritonServer(
            {"model": str(model), "dtype": "float32", **settings},
            repository=repository,
            ports=0,
            start_timeout_s=START_TIMEOUT_S,
        ) as server,
    ):
        yield server
