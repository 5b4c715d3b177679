"""Token buckets with a clock of their own."""

from hypothesis import given
from hypothesis import strategies as st

from client.gateway.security.quotas import Bucket

EVENTS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 20)), max_size=40)


@given(st.integers(1, 100), EVENTS)
def test_no_minute_has_more_than_two_minutes_worth(
    per_minute: int, events: list[tuple[float, int]]
) -> None:
    """A full bucket and what flows in meanwhile: in `s` seconds at most (1 + s / 60) of it."""
    now = 0.0
    bucket = Bucket(per_minute, lambda: now)
    taken = list[tuple[float, int]]()
    for pause, amount in events:
        now += pause
        if bucket.take(amount) == 0:
            taken.append((now, amount))
    for i, (begin, _) in enumerate(taken):
        for j in range(i, len(taken)):
            amount = sum(each for _, each in taken[i : j + 1])
            assert amount <= per_minute * (1 + (taken[j][0] - begin) / 60) * (1 + 1e-6)


@given(st.integers(1, 100), EVENTS, st.integers(0, 20))
def test_after_the_wait_it_is_there(
    per_minute: int, events: list[tuple[float, int]], amount: int
) -> None:
    now = 0.0
    bucket = Bucket(per_minute, lambda: now)
    for pause, charged in events:
        now += pause
        bucket.charge(charged)
    amount = min(amount, per_minute)
    wait = bucket.take(amount)
    if wait > 1e-5:  # half of it is more than rounding
        now += wait * 0.5
        assert bucket.take(amount) > 0
        now += wait * 0.5
        assert bucket.take(amount) == 0


def test_it_is_full_at_the_beginning_and_after_a_minute() -> None:
    now = 0.0
    bucket = Bucket(3, lambda: now)
    assert [bucket.take(1) for _ in range(4)] == [0, 0, 0, 20]
    now = 60.0
    assert [bucket.take(1) for _ in range(4)] == [0, 0, 0, 20]
    now = 1000.0  # no more than a minute's use is kept
    assert [bucket.take(1) for _ in range(4)] == [0, 0, 0, 20]


def test_what_is_owed_is_paid_first() -> None:
    now = 0.0
    bucket = Bucket(60, lambda: now)
    bucket.charge(90)
    assert bucket.take(0) == 30
    now = 30.0
    assert bucket.take(0) == 0
    assert bucket.take(1) == 1
