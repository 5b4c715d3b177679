import threading
import time

from engine.errors import EngineDeadError, TridentError
from engine.protocol.messages import Chunk
from engine.service.stub.delivery import Delivery
from engine.service.stub.stream import NewRequest, RequestStream
from tests.engine.service.stub.test_stream import Recorder, ids, out
from tests.waiting import eventually


def new_stream(sink: Recorder | None = None) -> RequestStream:
    return RequestStream(1, NewRequest([1], {}), sink or Recorder())


def test_tokens_that_come_fast_share_responses_but_the_first_and_last_do_not_wait() -> None:
    sink = Recorder()
    delivery, stream = Delivery(lambda stream: None), new_stream(sink)
    stream.append(out(0, 0))
    delivery.put([stream])
    assert eventually(lambda: sink.responses)
    stream.next_due = time.monotonic() + 60  # as if there were very many streams
    for token_id in range(1, 100):
        stream.append(out(0, token_id, finish="length" if token_id == 99 else None))
        delivery.put([stream])
    assert sink.ended.wait(60)
    assert [ids(chunks[0]) for chunks in sink.responses] == [[0], list(range(1, 100))]
    delivery.close()


def test_senders_keep_the_order_of_each_request_and_survive_a_broken_sink() -> None:
    class Broken(Recorder):
        def send(self, chunks: list[Chunk], *, last: bool) -> None:
            raise ValueError("the client has gone")

    answered: list[RequestStream] = []
    delivery = Delivery(answered.append)
    broken_sink = Broken()
    broken = RequestStream(1, NewRequest([1], {}), broken_sink)
    assert broken.append(out(0, 1))
    delivery.put([broken])
    sinks = [Recorder() for _ in range(20)]
    streams = [RequestStream(1, NewRequest([1], {}), sink) for sink in sinks]
    for position in range(50):
        for stream in streams:
            finish = "length" if position == 49 else None
            if stream.append(out(0, position, finish=finish)):
                delivery.put([stream])
    assert all(sink.ended.wait(60) for sink in sinks)
    delivery.close()
    assert answered.count(broken) == 1
    assert isinstance(broken.error, TridentError)
    assert len(answered) == 21  # each once
    assert str(broken_sink.error) == "internal error"  # its client does not wait for ever
    for sink in sinks:
        assert [i for chunks in sink.responses for i in ids(chunks[0])] == list(range(50))


def test_close_ends_a_request_whose_response_was_on_its_way() -> None:
    sending, go_on = threading.Event(), threading.Event()

    class Slow(Recorder):
        def send(self, chunks: list[Chunk], *, last: bool) -> None:
            sending.set()
            go_on.wait(60)
            super().send(chunks, last=last)

    sink = Slow()
    delivery = Delivery(lambda stream: None)
    stream = RequestStream(1, NewRequest([1], {}), sink)
    assert stream.append(out(0, 10))
    delivery.put([stream])
    assert sending.wait(60)
    stream.fail(EngineDeadError("gone"))
    delivery.put([stream])
    threading.Timer(0.1, go_on.set).start()
    delivery.close()
    assert str(sink.error) == "gone"
