import queue
import threading
import time

import pytest

from engine.service.cancellation import CancelPoller, check_interval_s


def test_the_poller_asks_until_told_not_to() -> None:
    heard: queue.Queue[int] = queue.Queue()
    asked: list[int] = []
    poller = CancelPoller(heard.put)

    def never() -> bool:
        asked.append(1)
        return False

    poller.watch(1, never)
    poller.watch(2, lambda: True)
    assert heard.get(timeout=60) == 2
    time.sleep(0.25)
    assert heard.empty()  # reported once
    assert asked
    poller.forget(1)
    poller.forget(1)
    poller.close()


def test_no_question_is_asked_once_a_request_is_forgotten() -> None:
    asking, answer = threading.Event(), threading.Event()
    asked_late: list[int] = []
    poller = CancelPoller(lambda uid: None)

    def slow() -> bool:
        asking.set()
        answer.wait(60)
        return False

    poller.watch(1, slow)
    poller.watch(2, lambda: bool(asked_late.append(2)))
    assert asking.wait(60)  # and 2 is next

    def forget() -> None:
        poller.forget(1)
        poller.forget(2)

    forgetting = threading.Thread(target=forget)
    forgetting.start()
    forgetting.join(0.1)
    assert forgetting.is_alive()  # until 1 has been answered
    answer.set()
    forgetting.join(60)
    num_asked = len(asked_late)
    time.sleep(0.25)
    assert len(asked_late) == num_asked
    poller.close()


def test_poller_check_that_fails_is_logged_once_and_stops_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: queue.Queue[int] = queue.Queue()
    rounds = iter(range(1, 100))
    poller = CancelPoller(heard.put)
    poller.watch(1, lambda: bool(1 // 0))
    poller.watch(2, lambda: next(rounds) == 3)
    assert heard.get(timeout=60) == 2
    poller.close()
    assert [record.message for record in caplog.records] == [
        "request 1 cannot be asked whether it was cancelled"
    ]


@pytest.mark.parametrize("num_requests", [0, 1, 10, 100, 256, 4096])
def test_check_interval_many_requests_bounds_the_checks_of_all(num_requests: int) -> None:
    """4,096 requests every 50 ms would be 82,000 round trips per second."""
    interval_s = check_interval_s(num_requests)
    assert 0.05 <= interval_s <= 2.0
    assert num_requests / interval_s <= 200 or interval_s == 2.0
