"""A checkpoint's `config.json`, with the fields that the setting `hf_overrides` changes.

How the weights are stored is not among them: the file's own fields name that.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.fields import Fields, read_json_object

_NAME = "config.json"
# Names of one object, of which the first is used where there are both; the second is that of
# transformers 5. Its kind has two names too.
_ROPE = ("rope_scaling", "rope_parameters")
_THETA, _KIND, _OLDER_KIND = "rope_theta", "rope_type", "type"
_OLDER_NAMES = {"torch_dtype": "dtype"}
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
    return Fields(overridden(read_json_object(checkpoint / _NAME), overrides), name=_NAME)


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields `values` of `config.json` with `overrides`; raises as `read_config`."""
    found, given = dict(values), overrides or {}
    for own_name, own_value in given.items():
        if own_name in _STORED:
            raise ConfigError(
                "cannot be overridden: it says how the file stores the weights; leave it out",
                param=f"hf_overrides: {own_name}",
            )
        name, value = _placed(own_name, own_value, found)
        before = found.get(name)
        if isinstance(before, Mapping) and isinstance(value, Mapping):
            found[name] = overridden(before, value)
        else:
            found[name] = value
    if _OLDER_KIND in given and _KIND in found and _KIND not in given:
        found[_KIND] = given[_OLDER_KIND]
    return found


def _placed(name: str, value: Any, found: Mapping[str, Any]) -> tuple[str, Any]:
    """Return by which name `found` has a field that has several, and the value there."""
    if (newer := _OLDER_NAMES.get(name)) in found and newer is not None:
        return newer, value
    rope = next((each for each in _ROPE if found.get(each)), None)
    if name in _ROPE:
        return rope or name, {_KIND: "default"} if value is None else value
    if name == _THETA and rope is not None and _THETA in found[rope]:
        return rope, {_THETA: value}
    return name, value
