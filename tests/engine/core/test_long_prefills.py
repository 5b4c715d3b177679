"""Long prefills beside requests that wait."""

import pytest

from engine.core.request import Request
from tests.factories.paged_oracle import PagedOracle, check_output
from tests.factories.requests import make_request, make_scheduler


def test_none_waits_for_a_long_prefill() -> None:
    """A quarter of the tokens of a step is left to those that wait, and to those behind them."""
    scheduler = make_scheduler(num_blocks=300, max_num_batched_tokens=64, max_model_len=512)
    oracle = PagedOracle(scheduler)
    first = make_request(1, range(400), max_tokens=2)
    second = make_request(2, range(500, 900), max_tokens=2)
    scheduler.add([first])
    oracle.step()
    assert first.num_computed_tokens == 64
    scheduler.add([second])
    oracle.step()
    assert (first.num_computed_tokens, second.num_computed_tokens) == (64 + 49, 15)
    oracle.step()  # nobody waits: the first has all but what each running one gets
    assert (first.num_computed_tokens, second.num_computed_tokens) == (113 + 63, 16)
    short = make_request(3, [1, 2, 3], max_tokens=2)
    scheduler.add([short])
    oracle.step()
    assert short.slot is not None
    assert first.num_computed_tokens > 176 + 40
    oracle.run()
    for request in (first, second, short):
        check_output(request)


@pytest.mark.parametrize(("num_blocks", "max_num_seqs"), [(110, 4), (300, 1)])
def test_a_long_prefill_has_all_while_none_can_be_admitted(
    num_blocks: int, max_num_seqs: int
) -> None:
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=512,
    )
    oracle = PagedOracle(scheduler)
    first = make_request(1, range(400), max_tokens=2)
    second = make_request(2, range(500, 900), max_tokens=2)
    for request in (first, second):
        scheduler.add([request])
    oracle.step()
    oracle.step()  # there is no slot, or it is found that there are too few blocks
    num_before = first.num_computed_tokens
    oracle.step()
    assert first.num_computed_tokens == num_before + 64
    oracle.run()
    check_output(second)


def prefill_beside_its_copies(num: int) -> tuple[PagedOracle, Request, list[Request]]:
    """Return a long prompt after its first step, and `num` equal ones that wait."""
    scheduler = make_scheduler(
        num_blocks=900, max_num_seqs=60, max_num_batched_tokens=64, max_model_len=1024
    )
    oracle = PagedOracle(scheduler)
    first = make_request(1, range(800), max_tokens=2)
    scheduler.add([first])
    oracle.step()
    others = [make_request(2 + i, range(800), max_tokens=2) for i in range(num)]
    for request in others:
        scheduler.add([request])
    return oracle, first, others


def test_little_is_left_to_those_that_wait_for_its_own_blocks() -> None:
    """They are passed over, many in each step."""

    def num_steps(num_others: int) -> int:
        oracle, first, others = prefill_beside_its_copies(num_others)
        steps = 1
        while first.num_output_tokens == 0:
            oracle.step()
            steps += 1
        oracle.run()
        for request in (first, *others):
            check_output(request)
        return steps

    assert num_steps(30) <= num_steps(0) + 1


def test_who_waits_behind_them_is_admitted() -> None:
    oracle, _, _ = prefill_beside_its_copies(20)
    short = make_request(100, [5, 6, 7], max_tokens=2)
    oracle.scheduler.add([short])
    for _ in range(4):
        oracle.step()
    assert short.slot is not None or short.finish is not None
    oracle.run()
    check_output(short)
