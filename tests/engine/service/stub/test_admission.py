from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.core.queue.queue_limits import Load, QueueLimits
from engine.errors import QueueFullError
from engine.protocol.messages import Ready
from engine.service.stub.admission import Admission

MAX_NUM_SEQS, MAX_MODEL_LEN = 2, 10
READY = Ready(
    MAX_MODEL_LEN,
    100,
    num_blocks=6,
    block_size=4,
    kv_cache_tokens=20,
    max_num_seqs=MAX_NUM_SEQS,
    description="",
)


def make(**settings: Any) -> Admission:
    return Admission(EngineConfig(**settings), READY)


def test_as_many_as_can_run_and_wait_are_let_in() -> None:
    admission = make(max_num_queued_reqs=3)
    for _ in range(MAX_NUM_SEQS + 3):
        admission.enter(Load(1, 1))
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 3 requests reached \(max_"):
        admission.enter(Load(1, 1))
    admission.leave(Load(1, 1))
    admission.enter(Load(1, 1))


def test_each_sequence_of_a_request_counts() -> None:
    admission = make(max_num_queued_reqs=4)
    admission.enter(Load(MAX_NUM_SEQS + 1, 1))
    with pytest.raises(QueueFullError, match="Maximum queue size of 4 requests"):
        admission.enter(Load(4, 1))
    admission.enter(Load(3, 1))


def test_tokens_beyond_what_can_run_count_as_waiting() -> None:
    admission = make(max_num_queued_reqs=100, max_num_queued_tokens=12)
    for _ in range(4):
        admission.enter(Load(1, 8))  # 32 tokens, of which 20 may be running
    with pytest.raises(QueueFullError, match=r"^Maximum queue size of 12 prompt tokens reached"):
        admission.enter(Load(1, 1))


def test_lower_priorities_do_not_keep_a_request_out() -> None:
    """The engine refuses them in its place; meanwhile there may be twice as many."""
    admission = make(max_num_queued_reqs=3, scheduling_policy="priority")
    for _ in range(MAX_NUM_SEQS + 3):
        admission.enter(Load(1, 1), priority=5)
    for priority in (5, 6):
        with pytest.raises(QueueFullError, match="Maximum queue size of 3 requests"):
            admission.enter(Load(1, 1), priority)
    for _ in range(3):
        admission.enter(Load(1, 1), priority=0)
    with pytest.raises(QueueFullError):
        admission.enter(Load(1, 1), priority=-1)
    admission.leave(Load(1, 1), priority=5)
    admission.enter(Load(1, 1), priority=-1)
    for priority, count in ((5, MAX_NUM_SEQS + 2), (0, 3), (-1, 1)):
        for _ in range(count):
            admission.leave(Load(1, 1), priority)
    assert admission.load == Load()


def test_without_priorities_a_full_queue_is_full_for_all() -> None:
    admission = make(max_num_queued_reqs=3)
    for _ in range(MAX_NUM_SEQS + 3):
        admission.enter(Load(1, 1), priority=5)
    with pytest.raises(QueueFullError):
        admission.enter(Load(1, 1), priority=-5)


def test_one_tenants_flood_does_not_keep_another_out() -> None:
    """The engine refuses some of the flood in its place; meanwhile there may be twice as many."""
    admission = make(max_num_queued_reqs=3)
    for _ in range(MAX_NUM_SEQS + 3):
        admission.enter(Load(1, 1), tenant="many")
    with pytest.raises(QueueFullError, match="Maximum queue size of 3 requests"):
        admission.enter(Load(1, 1), tenant="many")
    for _ in range(3):
        admission.enter(Load(1, 1), tenant="few")
    with pytest.raises(QueueFullError):
        admission.enter(Load(1, 1), tenant="third")
    for tenant, count in (("many", MAX_NUM_SEQS + 3), ("few", 3)):
        for _ in range(count):
            admission.leave(Load(1, 1), tenant=tenant)
    assert admission.load == Load()


def test_tenants_in_a_full_queue_cost_a_newcomer_few_operations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether one of 500 has more than the newcomer is known without a look at each."""
    admission = make(max_num_queued_reqs=1000)
    for number in range(500):
        admission.enter(Load(2, 2), tenant=str(number))
    for _ in range(MAX_NUM_SEQS):
        admission.enter(Load(1, 1), tenant="0")
    num_calls = 0
    share = QueueLimits.share

    def counted(limits: QueueLimits, load: Load) -> float:
        nonlocal num_calls
        num_calls += 1
        return share(limits, load)

    monkeypatch.setattr(QueueLimits, "share", counted)
    for number in range(300):
        admission.enter(Load(2, 2), tenant=f"new{number}")
        with pytest.raises(QueueFullError):
            admission.enter(Load(10, 10), tenant="0")
    assert num_calls < 10 * 300


@settings(max_examples=200)
@given(
    events=st.lists(
        st.one_of(st.builds(Load, st.integers(1, 3), st.integers(1, MAX_MODEL_LEN)), st.none()),
        max_size=60,
    ),
    max_reqs=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
)
def test_the_counts_are_those_of_what_is_unfinished(
    events: list[Load | None], max_reqs: int, max_tokens: int
) -> None:
    """Refused is only what can be neither among the running nor in the queue."""
    admission = make(max_num_queued_reqs=max_reqs, max_num_queued_tokens=max_tokens)
    unfinished: list[Load] = []
    for new in events:
        if new is None:
            if unfinished:
                admission.leave(unfinished.pop(0))
            continue
        sequences = sum(load.num_sequences for load in unfinished) - MAX_NUM_SEQS
        tokens = sum(load.num_tokens for load in unfinished) - MAX_NUM_SEQS * MAX_MODEL_LEN
        full = sequences > 0 and (
            sequences + new.num_sequences > max_reqs or max(0, tokens) + new.num_tokens > max_tokens
        )
        try:
            admission.enter(new)
        except QueueFullError:
            assert full
        else:
            assert not full
            unfinished.append(new)
        assert admission.load == Load(
            sum(load.num_sequences for load in unfinished),
            sum(load.num_tokens for load in unfinished),
        )
