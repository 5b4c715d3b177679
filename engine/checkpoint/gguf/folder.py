"""The folder that stands for a GGUF file: what the other stages read of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import version
from pathlib import Path

from engine.checkpoint.gguf.config import make_config
from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import read_gguf
from engine.checkpoint.gguf.tokenizer import write_tokenizer
from engine.checkpoint.made_folder import made_folder


def folder_of_gguf(file: Path) -> Path:
    """Return a folder with the file's `config.json` and tokenizer, and a link to the file.

    It is made once for a file, and again when what reads it has changed.

    Raises:
        UnsupportedError: an architecture or a feature that is not read from GGUF files.
        CheckpointError: the file is broken, or there is no place for the folder.
    """
    file = Path(os.path.abspath(file))  # not where links point: other parts are beside these
    state = file.stat()
    key = repr((str(file), state.st_size, state.st_mtime_ns, version("transformers"), _readers()))
    return made_folder("gguf", file.stem, key, lambda folder: _fill(folder, file))


def _readers() -> str:
    """Return a hash of the modules that read GGUF files."""
    sources = (each.read_bytes() for each in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(b"".join(sources)).hexdigest()


def _fill(folder: Path, file: Path) -> None:
    header = read_gguf(file)
    config = make_config(header)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / GGUF).symlink_to(file)
    write_tokenizer(folder, header)
