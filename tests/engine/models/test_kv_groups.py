"""Layers that see the same positions share block tables, without a layer's memory left over."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.models.kv_groups import KVGroups, group_layers

FULL = None
_LAYERS = st.lists(st.sampled_from([None, 4, 4, 9]), min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("windows", "groups", "num_caches"),
    [
        ([FULL] * 4, [FULL], 4),
        ([8] * 4, [8], 4),
        ([8, FULL, 8, FULL], [FULL, 8], 2),
        # Gemma 3's pattern: as many layers to a group as see everything.
        ([8, 8, 8, 8, 8, FULL] * 2, [FULL, 8, 8, 8, 8, 8], 2),
        # The last group is not full.
        ([8, 8, 8, FULL, 8, 8, FULL], [FULL, 8, 8, 8], 2),
        # Too few have a window.
        ([FULL, FULL, FULL, 8], [FULL], 4),
        # A window that no sequence outgrows is none.
        ([64, FULL, 64], [FULL], 3),
        ([8, 16, 8, 16], [8, 16], 2),
    ],
)
def test_groups(windows: list[int | None], groups: list[int | None], num_caches: int) -> None:
    found = group_layers(windows, 64)
    assert list(found.windows) == groups
    assert found.num_caches == num_caches


@given(_LAYERS)
def test_each_layer_has_a_place_of_its_own_in_a_group_that_keeps_what_it_sees(
    windows: list[int | None],
) -> None:
    found = group_layers(windows, 64)
    assert max(Counter(found.layer_caches).values()) == 1
    for (group, cache), window in zip(found.layer_caches, windows, strict=True):
        assert 0 <= cache < found.num_caches
        assert found.windows[group] in (window, None)
    assert {group for group, _ in found.layer_caches} == set(range(len(found.windows)))
    # Layers that see everything leave no memory unused.
    full = [group for group, window in enumerate(found.windows) if window is None]
    assert all(sum(g == group for g, _ in found.layer_caches) == found.num_caches for group in full)


def test_a_single_group() -> None:
    assert KVGroups.single(3) == group_layers([None] * 3, 1)
