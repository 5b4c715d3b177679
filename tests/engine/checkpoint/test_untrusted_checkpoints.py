"""Checkpoints that bring code, which is never run, or pointers of git LFS instead of files."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from engine import LLM
from engine.errors import CheckpointError, TridentError
from tests.factories.checkpoints import write_checkpoint
from tests.factories.pickles import Payload, replace_weights_by_a_pickle
from tests.factories.tokenizers import byte_level_tokenizer, save_tokenizer


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that appears when code of the checkpoint runs."""
    return tmp_path / "was here"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    tokenizer = byte_level_tokenizer()
    write_checkpoint(folder, vocab_size=len(tokenizer), max_position_embeddings=64)
    return save_tokenizer(tokenizer, folder)


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def add_code(checkpoint: Path, mark: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n\n\nclass Evil:\n    pass\n"
    (checkpoint / "modeling_evil.py").write_text(code)
    (checkpoint / "tokenization_evil.py").write_text(code)
    model = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "modeling_evil.Evil")
    change(checkpoint / "config.json", auto_map=model)
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    change(checkpoint / "tokenizer_config.json", auto_map=tokenizer)


def test_the_payload_would_work(mark: Path) -> None:
    pickle.loads(pickle.dumps(Payload(mark)))
    assert mark.exists()


def test_pickled_weights(checkpoint: Path, mark: Path) -> None:
    replace_weights_by_a_pickle(checkpoint, mark)
    with pytest.raises(TridentError, match=r"pickled weights \(pytorch_model\.bin\), .* code"):
        LLM(model=str(checkpoint))
    assert not mark.exists()


def test_a_pickle_named_safetensors(checkpoint: Path, mark: Path) -> None:
    replace_weights_by_a_pickle(checkpoint, mark)
    (checkpoint / "pytorch_model.bin").rename(checkpoint / "model.safetensors")
    with pytest.raises(TridentError, match=r"model\.safetensors"):
        LLM(model=str(checkpoint))
    assert not mark.exists()


def test_an_architecture_of_its_own(checkpoint: Path, mark: Path) -> None:
    add_code(checkpoint, mark)
    change(checkpoint / "config.json", architectures=["EvilForCausalLM"], model_type="evil")
    with pytest.raises(TridentError, match="EvilForCausalLM is not supported"):
        LLM(model=str(checkpoint))
    assert not mark.exists()


def test_code_beside_an_architecture_that_we_have_is_not_run(checkpoint: Path, mark: Path) -> None:
    add_code(checkpoint, mark)
    change(checkpoint / "tokenizer_config.json", tokenizer_class="Evil")
    assert LLM(model=str(checkpoint)).generate(["Hello"])[0].outputs[0].token_ids
    assert not mark.exists()


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
