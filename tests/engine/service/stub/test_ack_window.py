"""How many messages are on their way to the detokenizer, whatever is told of them."""

import threading
import time
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.service.stub import delivery
from engine.service.stub.delivery import AckWindow


def fill(window: AckWindow) -> list[int]:
    """Send until one more would wait; return the numbers that are to be told."""
    return [number for _ in range(delivery._WINDOW_SIZE) if (number := window.enter())]


def test_messages_wait_for_room_until_the_arrival_of_one_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delivery, "_LOST_S", 600)  # so that only what arrives makes room
    window = AckWindow()
    told = fill(window)
    entered = threading.Event()

    def send_all_that_has_room() -> None:
        for _ in range(told[0]):
            window.enter()
        entered.set()

    sender = threading.Thread(target=send_all_that_has_room, daemon=True)
    sender.start()
    assert not entered.wait(0.02)
    window.arrived(told[0])  # those before it too: some of them may have been dropped on the way
    assert entered.wait(60)
    sender.join()


def test_where_nothing_is_told_a_window_of_messages_goes_in_each_interval() -> None:
    window = AckWindow()
    fill(window)
    began = time.monotonic()
    fill(window)  # as if the detokenizer had been killed
    assert delivery._LOST_S <= time.monotonic() - began < 10 * delivery._LOST_S


def test_arrived_older_number_after_newer_one_keeps_the_room() -> None:
    window = AckWindow()
    told = fill(window)
    window.arrived(told[-1])
    window.arrived(told[0])
    began = time.monotonic()
    with patch.object(delivery, "_LOST_S", 10.0):
        fill(window)
        assert time.monotonic() - began < delivery._LOST_S


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20))
def test_no_news_lets_more_under_way_than_fit(news: list[int]) -> None:
    window = AckWindow()
    for number in news:
        window.arrived(number)
        window.enter()
    window.arrived(2**64 - 1)
    began = time.monotonic()
    with patch.object(
        delivery, "_LOST_S", 10.0
    ):  # more than other programs keep this thread waiting
        fill(window)
        assert time.monotonic() - began < delivery._LOST_S
    assert not window._has_room()
