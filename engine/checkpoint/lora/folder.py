"""The folder that stands for an adapter: its base's files, its own tokenizer, a link to itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from engine.checkpoint.lora.config import CONFIG
from engine.checkpoint.made_folder import made_folder
from engine.errors import CheckpointError, UnsupportedError

ADAPTER = "adapter"  # the link

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_VOCABULARY = ("vocab*", "merges.txt")


def is_adapter(folder: Path) -> bool:
    """Return whether there is an adapter in `folder`, and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").exists()


def folder_of_adapter(adapter: Path, base: Path) -> Path:
    """Return a folder in which the checkpoint `base` has the adapter beside it.

    Raises:
        UnsupportedError: the base is an adapter too.
        CheckpointError: the base is no model, or there is no place for the folder.
    """
    if is_adapter(base):
        raise UnsupportedError(
            f"{CONFIG}: base_model_name_or_path: {base} is an adapter too; merge that one into its "
            "base first (merge_and_unload of PEFT)"
        )
    if not (base / "config.json").is_file():
        raise CheckpointError(f"{CONFIG}: base_model_name_or_path: {base} has no config.json")
    links = dict(_links(Path(os.path.abspath(adapter)), Path(os.path.abspath(base))))
    return made_folder("lora", adapter.name, repr(sorted(links.items())), lambda f: _fill(f, links))


def _links(adapter: Path, base: Path) -> Iterator[tuple[str, Path]]:
    """Yield each file's name and what it links to."""
    tokenizer = [file for each in (*_TOKENIZER, *_VOCABULARY) for file in adapter.glob(each)]
    has_own = (adapter / "tokenizer.json").is_file()
    for file in base.iterdir():
        if not (has_own and any(file.match(each) for each in (*_TOKENIZER, *_VOCABULARY))):
            yield file.name, file
    if has_own:
        yield from ((file.name, file) for file in tokenizer)
    yield ADAPTER, adapter


def _fill(folder: Path, links: dict[str, Path]) -> None:
    for name, target in links.items():
        (folder / name).symlink_to(target)
