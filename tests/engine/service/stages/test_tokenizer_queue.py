import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import QueueFullError
from engine.service.stages.tokenizer_queue import TokenizerQueue, size_of

WAIT_S = 30


class Worker:
    """A queue whose worker is kept busy until `go_on`, by a small request or a `large` one."""

    def __init__(self, max_requests: int, max_bytes: int = 2**20, large: bool = False) -> None:
        self.queue = TokenizerQueue(max_requests, max_bytes)
        self.answered: list[int] = []
        self._started, self._go_on = threading.Event(), threading.Event()
        self.queue.put(self._block, 2**20 if large else 0, tenant="busy")
        assert self._started.wait(WAIT_S)

    def put(self, number: int, num_bytes: int = 1, tenant: str = "") -> None:
        self.queue.put(lambda: self.answered.append(number), num_bytes, tenant=tenant)

    def go_on(self) -> None:
        self._go_on.set()

    def close(self) -> None:
        self.go_on()
        self.queue.close()

    def _block(self) -> None:
        self._started.set()
        assert self._go_on.wait(WAIT_S)


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(*limits: int) -> Worker:
        made.append(Worker(*limits))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_requests_are_answered_in_order(worker: Callable[..., Worker]) -> None:
    busy = worker(100)
    for number in range(100):
        busy.put(number)
    assert busy.answered == []
    busy.close()
    assert busy.answered == list(range(100))


def test_more_requests_than_may_wait_are_refused_and_the_others_answered(
    worker: Callable[..., Worker],
) -> None:
    busy = worker(3)
    for number in range(3):
        busy.put(number)
    for number in range(3, 9):
        with pytest.raises(QueueFullError, match=r"^Maximum queue size of 3 requests reached"):
            busy.put(number)
    busy.close()
    assert busy.answered == [0, 1, 2]


def test_more_bytes_than_may_wait_are_refused(worker: Callable[..., Worker]) -> None:
    busy = worker(100, 10)
    busy.put(0, 6)
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 10 bytes reached"):
        busy.put(1, 5)
    busy.put(2, 4)
    busy.close()
    assert busy.answered == [0, 2]


def test_a_request_of_any_size_waits_where_nothing_does(worker: Callable[..., Worker]) -> None:
    busy = worker(100, 10)
    busy.put(0, 1000)
    with pytest.raises(QueueFullError):
        busy.put(1, 1)
    busy.close()
    assert busy.answered == [0]


def test_there_is_room_again_once_requests_were_answered(worker: Callable[..., Worker]) -> None:
    busy = worker(1, 10)
    busy.put(0, 10)
    with pytest.raises(QueueFullError):
        busy.put(1, 0)
    busy.go_on()
    for number in range(1, 50):
        answered = threading.Event()
        while True:
            try:
                busy.queue.put(answered.set, 10)
                break
            except QueueFullError:
                continue
        assert answered.wait(WAIT_S), number


def test_an_answer_that_raises_harms_no_other(worker: Callable[..., Worker]) -> None:
    busy = worker(100)
    busy.queue.put(lambda: 1 // 0, 1)  # type: ignore[arg-type, return-value]
    busy.put(1)
    busy.close()
    assert busy.answered == [1]


def test_a_closed_queue_takes_nothing(worker: Callable[..., Worker]) -> None:
    busy = worker(100)
    busy.close()
    with pytest.raises(QueueFullError, match="closing"):
        busy.put(0)


def test_tenants_are_answered_in_turn(worker: Callable[..., Worker]) -> None:
    """By bytes: one whose requests are large delays the others by one of these at most."""
    for small in (2**10, 2**20):  # all of them small, or none
        busy = worker(100, 2**30)
        for number in range(10):
            busy.put(number, 32 * small, "many")
        for number in range(10, 13):
            busy.put(number, small, "few")
        busy.close()
        assert busy.answered == [10, 11, 12, *range(10)]


def test_small_requests_do_not_wait_for_large_ones(worker: Callable[..., Worker]) -> None:
    """Nor for those of the same tenant: the second worker is for them alone."""
    busy = worker(100, 2**30, True)
    large, small = threading.Event(), threading.Event()
    busy.queue.put(large.set, 2**20, tenant="busy")
    for _ in range(3):
        small.clear()
        busy.queue.put(small.set, 2**10, tenant="busy")
        assert small.wait(WAIT_S)
    assert not large.is_set()
    busy.close()
    assert large.is_set()


def test_one_tenants_flood_does_not_keep_another_out(worker: Callable[..., Worker]) -> None:
    busy = worker(4, 100)
    for tenant, count in (("many", 4), ("few", 2), ("third", 1)):
        for number in range(count):
            busy.put(number, 25, tenant)
        with pytest.raises(QueueFullError, match=r"^Maximum queue size of"):
            busy.put(9, 25, tenant)
    busy.close()
    assert 9 not in busy.answered
    assert len(busy.answered) == 7


def test_a_stop_follows_the_request_that_it_stops(worker: Callable[..., Worker]) -> None:
    """Which may have to wait for others: so it would find nothing to stop."""
    busy = worker(2)
    busy.queue.put(lambda: busy.answered.append(1), 0, request_id="a")
    for number in (2, 3):
        busy.queue.put_after(lambda number=number: busy.answered.append(number), "a")  # type: ignore[misc]
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 2 requests"):
        busy.queue.put_after(lambda: None, "a")
    busy.put(4)
    busy.close()
    assert busy.answered == [1, 2, 3, 4]
    idle = worker(2)
    idle.queue.put_after(lambda: idle.answered.append(5), "b")  # there is none
    idle.close()
    assert idle.answered == [5]


def test_stop_of_an_id_used_twice_follows_the_newest_request(
    worker: Callable[..., Worker],
) -> None:
    """Also when the older one has been answered."""
    busy = worker(5, 2**30)
    started, go_on, passed = threading.Event(), threading.Event(), threading.Event()

    def newest() -> None:
        started.set()
        assert go_on.wait(WAIT_S)
        busy.answered.append(2)

    busy.queue.put(lambda: busy.answered.append(1), 0, request_id="a")
    busy.queue.put(newest, 2**20, request_id="a")  # large: small ones run beside it
    busy.queue.put(passed.set, 0)
    busy.go_on()
    assert started.wait(WAIT_S)
    assert passed.wait(WAIT_S)
    busy.queue.put_after(lambda: busy.answered.append(3), "a")
    passed.clear()
    busy.queue.put(passed.set, 0)
    assert passed.wait(WAIT_S)
    go_on.set()
    busy.close()
    assert busy.answered == [1, 2, 3]


def test_an_answered_request_is_not_kept() -> None:
    queue = TokenizerQueue(2)
    gone = threading.Event()

    class Kept:
        def __del__(self) -> None:
            gone.set()

    kept = Kept()
    queue.put(lambda kept=kept: None, 1)  # type: ignore[misc]
    del kept
    assert gone.wait(WAIT_S)
    queue.close()


def test_the_default_limit_is_what_the_engine_takes() -> None:
    queue = TokenizerQueue.of(EngineConfig(model="demo", max_num_queued_reqs=3, max_num_seqs=2))
    started, go_on = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        assert go_on.wait(WAIT_S)

    queue.put(block, 0)
    assert started.wait(WAIT_S)
    for _ in range(5):
        queue.put(lambda: None, 1)
    with pytest.raises(QueueFullError, match="Maximum queue size of 5 requests"):
        queue.put(lambda: None, 1)
    go_on.set()
    queue.close()


def test_size_counts_texts_and_numbers() -> None:
    tensors = {
        "text_input": np.array([[b"x" * 1000]], dtype=object),
        "stop_words": np.array([b"ab", b"c"], dtype=object),
        "top_k": np.array([1], dtype=np.int32),
    }
    assert size_of(tensors) == 1000 + 3 + 4
