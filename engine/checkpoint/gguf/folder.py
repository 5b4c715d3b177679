"""The folder that stands for a GGUF file: what the other stages read of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from engine.checkpoint.gguf.config import make_config
from engine.checkpoint.gguf.names import GGUF
from engine.checkpoint.gguf.reader import read_gguf
from engine.checkpoint.gguf.tokenizer import write_tokenizer
from engine.errors import CheckpointError


def folder_of_gguf(file: Path) -> Path:
    """Return a folder with the file's `config.json` and tokenizer, and a link to the file.

    It lies in `$XDG_CACHE_HOME/trident/gguf` (`~/.cache/trident/gguf`), or where that cannot be
    written to, in the temporary directory. It is made once for a file, and again when what reads it
    has changed; processes that make it at the same time do not harm each other.

    Raises:
        UnsupportedError: an architecture or a feature that is not read from GGUF files.
        CheckpointError: the file is broken, or there is no place for the folder.
    """
    file = Path(os.path.abspath(file))  # not where links point: other parts are beside these
    state = file.stat()
    key = repr((str(file), state.st_size, state.st_mtime_ns, version("transformers"), _readers()))
    name = f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    parent = _cache()
    if not (parent / name).is_dir():
        with tempfile.TemporaryDirectory(dir=parent) as temporary:
            made = Path(temporary) / name
            made.mkdir()
            _fill(made, file)
            with suppress(OSError):  # another process was faster
                made.rename(parent / name)
    return parent / name


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


def _cache() -> Path:
    for directory in _directories():
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK | os.X_OK):
                return directory
        except OSError:
            continue
    raise CheckpointError(
        "model: there is no place for the tokenizer of the GGUF file; name a directory that you "
        "can write to with XDG_CACHE_HOME"
    )


def _directories() -> Iterator[Path]:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the standard says to ignore such
        cache = os.path.expanduser("~/.cache")
    if os.path.isabs(cache):
        yield Path(cache) / "trident" / "gguf"
    yield Path(tempfile.gettempdir()) / f"trident-gguf.{os.getuid()}"
