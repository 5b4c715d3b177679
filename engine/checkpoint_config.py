"""A checkpoint's `config.json`, with the fields that the setting `hf_overrides` changes.

How the weights are stored is not among them: those of the file say that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.fields import Fields, read_json_object

NAME = "config.json"
# Names of one object, of which the first is used where there are both; the second is that of
# transformers 5.
_ROPE = ("rope_scaling", "rope_parameters")
_STORED = ("quantization_config", "compression_config")


def read_config(checkpoint: Path, overrides: Mapping[str, Any] | None = None) -> Fields:
    """Read `config.json` in the folder `checkpoint`.

    Args:
        overrides: fields that it gets; an object changes those fields of an object that it has.
            None: it stays as it is.

    Raises:
        CheckpointError: the file is missing or no JSON object.
        ConfigError: `overrides` has what cannot be changed.
    """
    return Fields(overridden(read_json_object(checkpoint / NAME), overrides), name=NAME)


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields `values` of `config.json` with `overrides`; raises as `read_config`."""
    found = dict(values)
    for name, value in (overrides or {}).items():
        if name in _STORED:
            raise ConfigError(f"hf_overrides: {name}: the format of the weights is the file's")
        target = name
        if name in _ROPE:
            target = next((each for each in _ROPE if found.get(each)), name)
        before = found.get(target)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            found[target] = overridden(before, value)
        else:
            found[target] = value
    return found
