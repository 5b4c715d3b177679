import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.attention.split_plan import plan_splits
from tests.kernels.attention.test_split_plan import check, lens

lengths = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 50_000)), min_size=1, max_size=40)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lengths, st.integers(0, 300), st.one_of(st.none(), st.integers(1, 5000)))
def test_every_key_is_planned_once_and_items_suffice(
    lengths: list[int], extra: int, window: int | None
) -> None:
    plan = plan_splits(lens(*lengths), len(lengths) + extra, 2, sliding_window=window)
    check(plan, lengths, window)
