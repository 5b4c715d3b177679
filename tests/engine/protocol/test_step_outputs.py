import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from engine.errors import ErrorReport
from engine.protocol.messages import (
    FromEngine,
    OutputDetails,
    Outputs,
    RequestFailed,
    RequestStats,
    SequenceOutput,
    TokenLogprobs,
)
from engine.protocol.step_outputs import StepOutputs
from engine.protocol.token_ids import pack_token_ids, unpack_token_ids
from engine.service.stub.stream import chunks_of

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
STATS = RequestStats(3, 2, 1, 0, 0.5, 1.0, 1.5, 2.0)
OUTPUTS = st.builds(
    SequenceOutput,
    uid=st.integers(0, 2**63 - 1),
    index=st.integers(0, 127),
    token_ids=IDS,
    window_ids=IDS,
    finish_reason=st.none() | st.sampled_from(["stop", "length", "abort"]),
    stop_reason=st.none() | st.integers(0, 9) | st.text(max_size=3),
    text_cut=st.integers(0, 9),
    logprobs=st.none() | st.just([TokenLogprobs([1], [-0.5], [1])]),
    cumulative_logprob=st.none() | st.floats(-9, 0),
    stats=st.none() | st.just(STATS),
    omit_stop_token=st.booleans(),
)
FAILURES = st.builds(
    RequestFailed,
    st.integers(0, 9),
    st.builds(ErrorReport, st.just("internal"), st.text(max_size=5)),
)


@given(st.lists(OUTPUTS | FAILURES, max_size=12))
def test_columns_hold_the_same_as_the_objects(
    produced: list[SequenceOutput | RequestFailed],
) -> None:
    columns = StepOutputs.of(produced)
    columns.check()
    rows = [each for each in produced if isinstance(each, SequenceOutput)]
    assert list(columns.rows()) == rows
    assert len(columns) == len(rows)
    assert bool(columns) == bool(produced)
    assert list(columns.failures) == [each for each in produced if isinstance(each, RequestFailed)]


@given(st.lists(st.lists(OUTPUTS, max_size=5), min_size=1, max_size=4))
def test_concatenated_split_and_sent_they_stay_the_same(parts: list[list[SequenceOutput]]) -> None:
    rows = [row for part in parts for row in part]
    whole = StepOutputs.concatenated([StepOutputs.of(part) for part in parts])
    first, second = whole.split()
    assert [*first.rows(), *second.rows()] == list(whole.rows()) == rows
    data = msgspec.msgpack.encode(whole.message())
    message = msgspec.msgpack.decode(data, type=FromEngine)
    assert isinstance(message, Outputs)
    assert list(StepOutputs.parse(message).rows()) == rows


@given(st.lists(OUTPUTS, max_size=8))
def test_the_stub_takes_the_bytes_of_each_row(rows: list[SequenceOutput]) -> None:
    chunks = list(chunks_of(StepOutputs.of(rows).message()))
    assert [uid for uid, _ in chunks] == [row.uid for row in rows]
    for (_, chunk), row in zip(chunks, rows, strict=True):
        assert chunk.index == row.index
        assert unpack_token_ids(chunk.token_ids).tolist() == row.token_ids
        assert unpack_token_ids(chunk.window_ids).tolist() == row.window_ids
        for name in OutputDetails.__struct_fields__:
            assert getattr(chunk.details, name) == getattr(row, name)


GOOD = StepOutputs.of(
    [SequenceOutput(1, 0, [5, 6], [4]), SequenceOutput(2, 1, [7], [5, 6], "stop")]
).message()


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("uids", b"\0" * 15, "uids: 15 bytes are not a whole number of int64"),
        ("uids", b"\0" * 8, "indexes: must have 1 rows"),
        ("indexes", b"\0" * 7, "indexes: 7 bytes are not a whole number"),
        ("token_ids", b"\0" * 11, "token_ids: 11 bytes are not a whole number"),
        ("token_ids", b"\0" * 8, "num_tokens: must add up to 2"),
        ("num_tokens", pack_token_ids([4, -1]), "num_tokens: must not be negative"),
        ("num_tokens", pack_token_ids([2**31 - 1, 2**31 - 1]), "num_tokens: must add up to 3"),
        ("num_window_tokens", pack_token_ids([3]), "num_window_tokens: must have 2 rows"),
        ("num_window_tokens", pack_token_ids([0, 4]), "num_window_tokens: must add up to 3"),
        ("details", {2: OutputDetails()}, "details: must be of rows below 2"),
        ("details", {-1: OutputDetails()}, "details: must be of rows below 2"),
    ],
)
def test_columns_that_do_not_fit_together_are_refused_by_name(
    field: str, value: object, error: str
) -> None:
    with pytest.raises(ValueError, match=f"^{error}"):
        list(chunks_of(structs.replace(GOOD, **{field: value})))


@given(
    st.lists(st.binary(max_size=24), min_size=6, max_size=6),
    st.dictionaries(st.integers(-1, 3), st.just(OutputDetails(finish_reason="stop"))),
)
def test_any_bytes_are_refused_or_fit_together(
    columns: list[bytes], details: dict[int, OutputDetails]
) -> None:
    message = Outputs(*columns, details)
    try:
        chunks = list(chunks_of(message))
    except ValueError:
        return
    assert len(chunks) == len(message.uids) // 8
    assert b"".join(chunk.token_ids for _, chunk in chunks) == message.token_ids
    assert b"".join(chunk.window_ids for _, chunk in chunks) == message.window_ids


def test_arrays_of_any_integer_type_are_sent_as_declared() -> None:
    wide = StepOutputs(*(np.array([0], dtype=np.int64) for _ in range(4)), *[np.zeros(0, int)] * 2)
    assert [uid for uid, _ in chunks_of(wide.message())] == [0]


@given(st.lists(st.lists(OUTPUTS, max_size=5), min_size=1, max_size=4), st.integers(1, 3))
def test_joined_each_sequence_says_the_same_in_fewer_rows(
    parts: list[list[SequenceOutput]], num_uids: int
) -> None:
    """What a stub makes of them: all tokens behind the first window, up to the next details."""
    steps = [
        StepOutputs.of(
            [structs.replace(each, uid=each.uid % num_uids, index=each.index % 2) for each in part]
        )
        for part in parts
    ]
    whole = StepOutputs.concatenated(steps)
    joined = whole.joined()
    joined.check()
    plain = SequenceOutput(0, 0, [], [])
    for uid in range(num_uids):
        for index in range(2):
            expected: list[SequenceOutput] = []
            is_bare = False
            for row in (each for each in whole.rows() if (each.uid, each.index) == (uid, index)):
                bare = structs.replace(row, token_ids=[], window_ids=[], uid=0, index=0)
                if expected and bare == plain and is_bare:
                    tokens = expected[-1].token_ids + row.token_ids
                    expected[-1] = structs.replace(expected[-1], token_ids=tokens)
                else:
                    expected.append(row)
                is_bare = bare == plain
            found = [each for each in joined.rows() if (each.uid, each.index) == (uid, index)]
            assert found == expected
    assert joined.failures == whole.failures
