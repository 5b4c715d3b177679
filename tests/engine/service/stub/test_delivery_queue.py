import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from engine.service.stub.delivery import DeliveryQueue
from engine.service.stub.stream import NewRequest, RequestStream
from tests.engine.service.stub.test_stream import Recorder
from tests.waiting import eventually


def new_stream() -> RequestStream:
    return RequestStream(1, NewRequest([1], {}), Recorder())


@given(dues=st.lists(st.tuples(st.integers(0, 4), st.integers(-9, 0)), min_size=1, max_size=30))
def test_each_stream_waits_once_and_is_taken_by_its_earliest_time(
    dues: list[tuple[int, int]],
) -> None:
    queue, streams = DeliveryQueue(), [new_stream() for _ in range(5)]
    earliest: dict[int, int] = {}
    for which, due in dues:
        queue.put([(streams[which], due)])
        earliest[which] = min(due, earliest.get(which, due))
    taken = []
    queue.close()
    while batch := queue.take():
        taken += [streams.index(stream) for stream in batch]
        queue.done(batch)
    assert sorted(taken) == sorted(earliest)
    assert [earliest[which] for which in taken] == sorted(earliest.values())


def test_what_is_put_while_a_sender_has_it_waits_again() -> None:
    queue, stream = DeliveryQueue(), new_stream()
    queue.put([(stream, 0.0)])
    assert queue.take() == [stream]
    queue.put([(stream, 0.0)])
    queue.put([(stream, 5.0)])
    queue.done([stream])
    assert queue.take() == [stream]
    queue.done([stream])
    queue.close()
    assert not queue.take()


def test_put_of_a_busy_stream_for_later_keeps_its_earlier_time() -> None:
    queue, stream = DeliveryQueue(), new_stream()
    queue.put([(stream, 0.0)])
    assert queue.take() == [stream]
    later = time.monotonic() + 10
    queue.put([(stream, 0.0)])
    queue.put([(stream, later)])
    queue.done([stream])
    assert queue.take() == [stream]
    assert time.monotonic() < later


def test_a_turn_comes_when_it_is_due_and_an_urgent_one_at_once() -> None:
    queue, stream, other = DeliveryQueue(), new_stream(), new_stream()
    began = time.monotonic()
    queue.put([(stream, began + 0.05)])
    assert queue.take() == [stream]
    assert time.monotonic() >= began + 0.05
    queue.put([(other, time.monotonic() + 60)])
    threading.Timer(0.05, queue.put, ([(other, 0.0)],)).start()
    assert queue.take() == [other]
    assert time.monotonic() < began + 30


def test_what_is_due_together_is_taken_together_up_to_a_few() -> None:
    queue, streams = DeliveryQueue(), [new_stream() for _ in range(11)]
    queue.put((stream, 0.0) for stream in streams)
    first, second = queue.take(), queue.take()
    assert [*first, *second] == streams
    assert len(first) == 8


def test_many_threads_lose_no_turn() -> None:
    """Each stream is put often, at once and for later; its last turn comes after its last put."""
    queue, streams = DeliveryQueue(), [new_stream() for _ in range(20)]
    wanted = dict.fromkeys(streams, 0)
    seen = dict.fromkeys(streams, 0)
    holders: set[RequestStream] = set()

    def work() -> None:
        while batch := queue.take():
            for stream in batch:
                assert stream not in holders
                holders.add(stream)
                seen[stream] = wanted[stream]
            time.sleep(0)
            holders.difference_update(batch)
            queue.done(batch)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(1, 300):
        for index, stream in enumerate(streams):
            wanted[stream] = number
            due = 0.0 if (number + index) % 3 else time.monotonic() + 0.001
            queue.put([(stream, due)])
    assert eventually(lambda: seen == wanted, 30)
    queue.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
