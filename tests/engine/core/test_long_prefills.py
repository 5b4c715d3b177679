"""Long prefills beside requests that wait."""

import pytest

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
