import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from engine.config.engine_config import EngineConfig
from engine.errors import QueueFullError
from engine.service.stages.tokenizer_queue import TokenizerQueue, size_of

WAIT_S = 30


class Worker:
    """A queue whose worker is kept busy until `go_on`."""

    def __init__(self, max_requests: int, max_bytes: int = 2**20) -> None:
        self.queue = TokenizerQueue(max_requests, max_bytes)
        self.answered: list[int] = []
        self._started, self._go_on = threading.Event(), threading.Event()
        self.queue.put(self._block, max_bytes)
        assert self._started.wait(WAIT_S)

    def put(self, number: int, num_bytes: int = 1) -> None:
        self.queue.put(lambda: self.answered.append(number), num_bytes)

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
