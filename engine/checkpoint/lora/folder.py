"""The folder that stands for an adapter: its base's files, its own tokenizer, a link to itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.checkpoint.lora.config import CONFIG
from engine.checkpoint.made_folder import made_folder
from engine.errors import CheckpointError, UnsupportedError
from engine.fields import read_json_object

ADAPTER = "adapter"  # the link
WEIGHTS = "adapter_model.safetensors"
_MODEL = "config.json"
# As families of models call it.
_EMBEDDING = re.compile(r".*\.(embed_tokens|embed_in|wte|word_embeddings)(\.base_layer)?\.weight")

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")
_VOCABULARY = ("vocab*", "merges.txt")


def is_adapter(folder: Path) -> bool:
    """Return whether there is an adapter in `folder`, and no model."""
    return (folder / CONFIG).is_file() and not (folder / _MODEL).exists()


def folder_of_adapter(adapter: Path, base: Path) -> Path:
    """Return a folder in which the checkpoint `base` has the adapter beside it.

    Raises:
        UnsupportedError: the base is an adapter too.
        CheckpointError: the base is no model, or there is no place for the folder.
    """
    if is_adapter(base):
        raise UnsupportedError(
            f"{base} is itself an adapter; merge it into its base first (merge_and_unload of PEFT)",
            param=f"{CONFIG}: base_model_name_or_path",
        )
    if not (base / _MODEL).is_file():
        raise CheckpointError(
            f"{base} has no {_MODEL}; give the folder of the base model",
            param=f"{CONFIG}: base_model_name_or_path",
        )
    links = dict(_links(Path(os.path.abspath(adapter)), Path(os.path.abspath(base))))
    size = _vocabulary_size(adapter)
    key = repr((sorted(links.items()), size))
    return made_folder("lora", adapter.name, key, lambda folder: _fill(folder, links, size))


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


def _vocabulary_size(adapter: Path) -> int | None:
    """Return how many tokens there are in the embedding that the adapter has of its own, if any."""
    try:
        with safe_open(adapter / WEIGHTS, framework="numpy") as file:
            found = next((name for name in file.offset_keys() if _EMBEDDING.fullmatch(name)), None)
            shape = [] if found is None else file.get_slice(found).get_shape()
            return shape[0] if len(shape) == 2 else None
    except (SafetensorError, OSError):  # reported when its tensors are read
        return None


def _fill(folder: Path, links: dict[str, Path], vocabulary_size: int | None) -> None:
    for name, target in links.items():
        (folder / name).symlink_to(target)
    config = read_json_object(links[_MODEL])
    text = config if "vocab_size" in config else config.get("text_config")
    if not isinstance(text, dict) or vocabulary_size is None:  # its reader reports what is wrong
        return
    if text.get("vocab_size") != vocabulary_size:
        text["vocab_size"] = vocabulary_size
        (folder / _MODEL).unlink()
        (folder / _MODEL).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
