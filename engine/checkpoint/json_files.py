"""Reading the small JSON files of a checkpoint folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.lfs import unreadable
from engine.errors import CheckpointError


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file at `path`, or `{}` if there is no such file.

    Raises:
        CheckpointError: the file cannot be read, or is not one JSON object.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise unreadable(path, f"{path.name}: is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path.name}: must hold one JSON object")
    return fields
