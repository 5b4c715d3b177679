"""Whatever else is scheduled, a beam search finds what it finds alone, and so do the others."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.factories.arrivals import Arrival, arrivals, schedulers, serve
from tests.factories.beams import expected_beams, make_beams
from tests.factories.paged_oracle import VOCAB, PagedOracle, expected_output


@given(
    asked=st.lists(
        # Beams beside the outputs, or None for plain samples; and stop tokens.
        st.tuples(arrivals(), st.sampled_from([None, 1, 3]), st.integers(5, 40)),
        min_size=1,
        max_size=6,
    ),
    scheduler=schedulers(),
    num_ahead=st.sampled_from([0, 1]),
)
def test_outputs_do_not_depend_on_company(
    asked: list[tuple[Arrival, int | None, int]], scheduler: Scheduler, num_ahead: int
) -> None:
    """Random arrivals, aborts and preemptions; fewer slots or blocks than beams."""
    groups: list[list[Request]] = []
    expected: list[Sequence[tuple[list[int], str]]] = []
    for uid, (arrival, more, stop) in enumerate(asked):
        group = arrival.group(uid)
        if more is None:
            samples = (expected_output(r.token_ids, arrival.max_tokens, r.index) for r in group)
            expected.append([(tokens, "length") for tokens in samples])
            groups.append(group)
            continue
        beams = make_beams(
            uid,
            group[0].token_ids,
            width=arrival.n + more,
            n=arrival.n,
            max_tokens=arrival.max_tokens,
            stop_token_ids=frozenset(range(stop, VOCAB, 4)),
            priority=arrival.priority,
            tenant=arrival.tenant,
        )
        expected.append(expected_beams(beams))
        groups.append([*beams])
    serve(PagedOracle(scheduler, num_ahead), [arrival for arrival, *_ in asked], groups)
    for group, outputs in zip(groups, expected, strict=True):
        handed_out = [each for request in group for each in request.results()]
        assert [each.index for each in handed_out] == list(range(len(outputs)))
        for request, output in zip(handed_out, outputs, strict=True):
            found = request.token_ids[request.num_prompt_tokens :].tolist()
            assert request.finish_reason == "abort" or (found, request.finish_reason) == output
    scheduler.kv_cache.check_idle()
