import threading
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.errors import EngineDeadError, TridentError
from engine.protocol.messages import Chunk, OutputDetails, PromptLogprobs, TokenLogprobs
from engine.protocol.token_ids import pack_token_ids, unpack_token_ids
from engine.service.stub.stream import NewRequest, RequestStream


class Recorder:
    def __init__(self) -> None:
        self.responses: list[list[Chunk]] = []
        self.error: TridentError | None = None
        self.ended = threading.Event()

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        assert not self.ended.is_set()
        self.responses.append(chunks)
        if last:
            self.ended.set()

    def fail(self, error: TridentError) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()


def out(
    index: int, *token_ids: int, window: Sequence[int] = (), finish: str | None = None, **more: Any
) -> Chunk:
    details = OutputDetails(finish_reason=finish, **more)
    return Chunk(index, pack_token_ids(window), pack_token_ids(token_ids), details)


def ids(chunk: Chunk) -> list[int]:
    return unpack_token_ids(chunk.token_ids).tolist()


def test_what_is_queued_becomes_one_chunk_per_sequence() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1, 2, 3], {}, num_sequences=2, text_prefix="P"), sink)
    one, two, three = (TokenLogprobs([i], [-1.0], [1]) for i in (10, 11, 20))
    assert stream.append(out(0, 10, window=[2, 3], logprobs=[one], cumulative_logprob=-1.0))
    assert not stream.append(out(1, 20, window=[2, 3], logprobs=[three]))
    assert not stream.append(out(0, 11, window=[10], logprobs=[two], cumulative_logprob=-2.0))
    stream.deliver()
    stream.deliver()  # with nothing new
    first = out(0, 10, 11, window=[2, 3], logprobs=[one, two], cumulative_logprob=-2.0)
    second = out(1, 20, window=[2, 3], logprobs=[three])
    assert sink.responses == [
        [
            structs.replace(first, text_prefix="P"),
            structs.replace(second, text_prefix="P"),
        ]
    ]
    assert stream.append(out(0, 12, window=[3, 10, 11], finish="stop", text_cut=4))
    assert not stream.is_urgent
    stream.deliver()
    assert sink.responses[1:] == [[out(0, 12, window=[3, 10, 11], finish="stop", text_cut=4)]]
    assert not sink.ended.is_set()
    assert stream.append(out(1, finish="length"))
    assert stream.is_urgent
    stream.deliver()
    assert sink.responses[2:] == [[out(1, finish="length")]]
    assert sink.ended.is_set()


def test_joined_chunks_begin_in_the_section_of_the_first() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}), sink)
    stream.append(out(0, 5, parser_state=(1, 0)))
    stream.append(out(0, 6, parser_state=(0, 1)))
    stream.append(out(0, 7, finish="length", parser_state=(2, 2)))
    stream.deliver()
    assert sink.responses == [[out(0, 5, 6, 7, finish="length", parser_state=(1, 0))]]


def test_what_came_with_the_first_of_joined_chunks_stays() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1, 2], {}), sink)
    found = PromptLogprobs(*(bytes(4),) * 3, b"", b"")
    stream.append(out(0, 10, window=[2], prompt_logprobs=found))
    stream.append(out(0, 11, window=[10], finish="length"))
    stream.deliver()
    expected = out(0, 10, 11, window=[2], finish="length", prompt_logprobs=found)
    assert sink.responses == [[expected]]


def test_without_streaming_there_is_one_response() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}, num_sequences=2, stream=False), sink)
    assert not stream.append(out(1, 20, finish="stop"))
    assert not stream.append(out(0, 10))
    assert stream.append(out(0, 11, finish="length"))
    stream.deliver()
    assert [[(c.index, ids(c)) for c in chunks] for chunks in sink.responses] == [
        [(0, [10, 11]), (1, [20])]
    ]


def test_an_error_takes_the_place_of_what_is_pending() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}), sink)
    stream.append(out(0, 10))
    assert not stream.is_urgent
    assert stream.fail(EngineDeadError("gone"))
    assert stream.is_urgent
    stream.deliver()
    assert sink.responses == []
    assert str(sink.error) == "gone"
    assert not stream.fail(EngineDeadError("again"))
    assert not stream.append(out(0, 11))  # the process goes on for a moment
    assert not stream.append(out(0, finish="abort"))
    assert stream.finished
    stream.deliver()
    assert str(sink.error) == "gone"


def test_nothing_follows_the_last_response() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}), sink)
    stream.append(out(0, 10, finish="stop"))
    stream.deliver()
    assert not stream.fail(EngineDeadError("too late"))
    stream.deliver()
    assert sink.error is None


def test_an_end_that_was_not_sent_yet_is_not_replaced_by_an_error() -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}), sink)
    stream.append(out(0, 10, finish="stop"))
    assert not stream.fail(EngineDeadError("too late"))
    stream.deliver()
    assert [ids(chunk) for (chunk,) in sink.responses] == [[10]]


@given(
    pieces=st.lists(st.lists(st.integers(10, 19), max_size=3), min_size=1, max_size=8),
    turns=st.lists(st.booleans(), min_size=8, max_size=8),
)
def test_any_coalescing_gives_the_same_tokens_and_true_windows(
    pieces: list[list[int]], turns: list[bool]
) -> None:
    sink = Recorder()
    stream = RequestStream(1, NewRequest([1], {}), sink)
    before: list[int] = []
    asked = False  # for what has been appended since the last `deliver`
    for number, (piece, turn) in enumerate(zip(pieces, turns, strict=False), start=1):
        finish = "stop" if number == len(pieces) else None
        asked |= stream.append(out(0, *piece, window=list(before), finish=finish))
        before += piece
        if asked and (turn or finish):
            stream.deliver()
            asked = False
    seen: list[int] = []
    for chunks in sink.responses:
        for chunk in chunks:
            assert unpack_token_ids(chunk.window_ids).tolist() == seen
            seen += ids(chunk)
    assert seen == before
