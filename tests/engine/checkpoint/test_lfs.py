"""A file that git has not fetched is told as such, whatever it should hold."""

from pathlib import Path

import pytest

from engine import LLM
from engine.errors import CheckpointError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "a.gguf"])
def test_a_pointer_of_git_lfs(tmp_path: Path, name: str) -> None:
    tokenizer = byte_level_tokenizer()
    write_checkpoint(tmp_path, vocab_size=len(tokenizer))
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / name).write_text(POINTER)
    model = tmp_path / name if name.endswith(".gguf") else tmp_path
    with pytest.raises(CheckpointError, match=rf"{name}: is a pointer of Git LFS.*git lfs pull"):
        LLM(model=str(model), device="cpu")
