"""Reading the small JSON files of a checkpoint folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from engine.checkpoint.lfs import unreadable
from engine.errors import CheckpointError
from engine.json_reader import parse_json


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, or `{}` if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or is not one JSON object.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", param=path.name) from None
    fields = parse_json(content, "", partial(unreadable, path, param=path.name))
    if not isinstance(fields, dict):
        raise CheckpointError("must hold one JSON object", param=path.name)
    return fields
