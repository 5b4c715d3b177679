"""Whatever a field of a family's `config.json` is, it is read, or refused in words for the user."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import TridentError
from engine.models.registry import read_model_spec
from tests.factories.checkpoints import write_checkpoint
from tests.factories.families import FAMILIES

_MISSING = object()
_VALUES = [
    *("x", "", "full_attention", True, False, None, _MISSING),
    *(-1, 0, 0.3, -0.5, 2**40, 1e308, math.inf, math.nan),
    *([], [None], [1, "a"], [[1]], {}, {"a": 1}),
]
FieldPath = tuple[str, ...]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, fields = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, architecture, **fields)
    return path


def field_paths(fields: dict[str, Any], above: FieldPath = ()) -> Iterator[FieldPath]:
    for name, value in fields.items():
        if name != "vision_config":  # of the part that is not served
            yield (*above, name)
            if isinstance(value, dict):
                yield from field_paths(value, (*above, name))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_field_of_any_value(folder: Path, data: st.DataObject) -> None:
    path = folder / "config.json"
    given_text = path.read_text(encoding="utf-8")
    changed = copy.deepcopy(json.loads(given_text))
    *above, name = data.draw(st.sampled_from(list(field_paths(changed))))
    value = data.draw(st.sampled_from(_VALUES))
    fields = changed
    for each in above:
        fields = fields[each]
    if value is _MISSING:
        del fields[name]
    else:
        fields[name] = value
    path.write_text(json.dumps(changed), encoding="utf-8")
    refused = None
    try:
        read_model_spec(folder)
    except TridentError as error:
        refused = str(error)
    finally:
        path.write_text(given_text, encoding="utf-8")
    assert refused is None or ": " in refused  # the field, and what is wrong with it
