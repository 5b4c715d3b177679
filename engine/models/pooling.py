"""The task of a checkpoint, to generate or to embed, and how it pools hidden states.

Its files are those of sentence-transformers. Trident takes the state of the last token, scaled to
the length 1; so do most models with causal attention that are made for embeddings, and all others
where nothing is said.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError
from engine.fields import Fields, read_json_object
from engine.json_reader import parse_json
from engine.models.registry import DECODERS

_MODULES = "modules.json"
_LAST_TOKEN = "lasttoken"
_MODE = "pooling_mode_"  # older files have one field for each mode
_KNOWN = ("Transformer", "Pooling", "Normalize")


class Task(NamedTuple):
    """What a checkpoint is made for: to generate texts, or to embed them.

    Attributes:
        generates: whether it is made to continue texts; else only to embed them.
        why_not_embedded: why texts cannot be embedded as it wants it; "" if they can.
    """

    generates: bool = True
    why_not_embedded: str = ""


BOTH = Task()


def task_of(checkpoint: Path, architecture: str) -> Task:
    """Return the task of the checkpoint in a folder.

    Args:
        checkpoint: the folder.
        architecture: as in `ModelSpec`.

    Raises:
        CheckpointError: a file is broken.
    """
    path = checkpoint / _MODULES
    if path.is_file():
        return Task(False, _problem(checkpoint, _modules(path)))
    return Task(generates=architecture not in DECODERS)


def _problem(checkpoint: Path, modules: list[Fields]) -> str:
    for module in modules:
        kind = module.text("type", default="").rpartition(".")[2]
        if kind not in _KNOWN:
            return f"{_MODULES}: a module {kind} is not supported"
        if kind == "Pooling":
            name = f"{module.text('path', default='')}/config.json"
            modes = _modes(Fields(read_json_object(checkpoint / name), name=name))
            if modes != [_LAST_TOKEN]:
                return f"{name}: pooling {' and '.join(modes) or 'of no kind'} is not supported"
    return ""


def _modules(path: Path) -> list[Fields]:
    found = parse_json(path.read_bytes(), "", partial(CheckpointError, param=_MODULES))
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise CheckpointError("must hold a list of objects", param=_MODULES)
    return [Fields(each, name=_MODULES) for each in found]


def _modes(config: Fields) -> list[str]:
    given: Any = config.raw("pooling_mode")
    if given is not None:
        return list(config.texts("pooling_mode") or ()) if isinstance(given, list) else [str(given)]
    names = [name for name in config.names() if name.startswith(_MODE)]
    modes = (name.removeprefix(_MODE) for name in names if config.boolean(name, default=False))
    return [mode.removesuffix("_tokens").removesuffix("_token") for mode in modes]
