import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import QueueFullError
from engine.protocol import Ready
from engine.service.stub.admission import Admission
from engine.service.stub.delivery import NewRequest

MAX_NUM_SEQS, MAX_MODEL_LEN = 2, 10
READY = Ready(MAX_MODEL_LEN, 100, num_blocks=6, block_size=4, description="")


def make(**settings: int) -> Admission:
    config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, **settings)
    return Admission(config, READY)


def request(num_tokens: int = 1) -> NewRequest:
    return NewRequest([7] * num_tokens, {})


def test_as_many_as_can_run_and_wait_are_let_in() -> None:
    admission = make(max_num_queued_reqs=3)
    for _ in range(MAX_NUM_SEQS + 3):
        admission.enter(request())
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 3 requests reached \(max_"):
        admission.enter(request())
    admission.leave(request())
    admission.enter(request())


def test_tokens_beyond_what_can_run_count_as_waiting() -> None:
    admission = make(max_num_queued_reqs=100, max_num_queued_tokens=12)
    for _ in range(4):
        admission.enter(request(8))  # 32 tokens, of which 20 may be running
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 12 prompt tokens reached"):
        admission.enter(request(1))


def test_by_default_the_queue_is_as_long_in_tokens_as_in_requests() -> None:
    admission = make(max_num_queued_reqs=8)
    assert admission._limits.max_tokens == 5 * 4 * 8 // 2


@settings(max_examples=200)
@given(
    events=st.lists(st.one_of(st.integers(1, MAX_MODEL_LEN), st.just(0)), max_size=60),
    max_reqs=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
)
def test_the_counts_are_those_of_what_is_unfinished(
    events: list[int], max_reqs: int, max_tokens: int
) -> None:
    """Refused is only what can be neither among the running nor in the queue."""
    admission = make(max_num_queued_reqs=max_reqs, max_num_queued_tokens=max_tokens)
    unfinished: list[NewRequest] = []
    for num_tokens in events:
        if num_tokens == 0:
            if unfinished:
                admission.leave(unfinished.pop(0))
            continue
        waiting = len(unfinished) - MAX_NUM_SEQS
        tokens = sum(len(r.prompt_token_ids) for r in unfinished)
        waiting_tokens = max(0, tokens - MAX_NUM_SEQS * MAX_MODEL_LEN) + num_tokens
        full = waiting >= max_reqs or (waiting > 0 and waiting_tokens > max_tokens)
        try:
            admission.enter(request(num_tokens))
        except QueueFullError:
            assert full
        else:
            assert not full
            unfinished.append(request(num_tokens))
        assert admission.num_requests == len(unfinished)
        assert admission.num_tokens == sum(len(r.prompt_token_ids) for r in unfinished)
