"""Whatever else is scheduled, each request gets the tokens that it gets alone."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from engine.core.constraints.bad_words import BadWords
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from tests.factories.arrivals import Arrival, arrivals, schedulers, serve
from tests.factories.drafts import proposers
from tests.factories.late_grammars import FollowedGrammar, LateWorkers
from tests.factories.paged_oracle import VOCAB, PagedOracle, expected_output
from tests.factories.requests import StopString

# A token that stops it; on the device too, or known to the host alone; or the host has a part in
# choosing every token.
_STOPS = st.tuples(st.integers(0, VOCAB - 1), st.sampled_from(["none", "token", "string", "host"]))


@given(
    asked=st.lists(st.tuples(arrivals(), _STOPS), min_size=1, max_size=8),
    scheduler=schedulers(),
    num_ahead=st.sampled_from([0, 1]),
)
def test_outputs_do_not_depend_on_company(
    asked: list[tuple[Arrival, tuple[int, str]]], scheduler: Scheduler, num_ahead: int
) -> None:
    """Random arrivals, forks, stops, aborts, preemptions: everybody gets what they get alone."""
    check_outputs(asked, scheduler, num_ahead)


@given(
    asked=st.lists(st.tuples(arrivals(), _STOPS), min_size=1, max_size=8),
    scheduler=schedulers(proposer=proposers()),
)
def test_outputs_do_not_depend_on_drafts(
    asked: list[tuple[Arrival, tuple[int, str]]], scheduler: Scheduler
) -> None:
    check_outputs(asked, scheduler, num_ahead=0)


@given(
    asked=st.lists(st.tuples(arrivals(), _STOPS, st.booleans()), min_size=1, max_size=8),
    scheduler=schedulers(
        mask_workers=st.lists(st.booleans(), max_size=6).map(lambda b: LateWorkers([*b, False]))
    ),
    num_ahead=st.sampled_from([0, 1]),
)
def test_outputs_do_not_depend_on_late_masks(
    asked: list[tuple[Arrival, tuple[int, str], bool]], scheduler: Scheduler, num_ahead: int
) -> None:
    """Sequences sit out until their grammars have followed, which follow every token once."""
    arrived: list[tuple[Arrival, tuple[int, str]]] = [each[:2] for each in asked]
    groups = [arrival.group(uid) for uid, (arrival, _) in enumerate(arrived)]
    grammars: list[tuple[Request, FollowedGrammar]] = []
    for group, (*_, has_grammar) in zip(groups, asked, strict=True):
        for request in group if has_grammar else ():
            grammars.append((request, FollowedGrammar()))
            request.grammar = grammars[-1][1]  # type: ignore[assignment]
    check_outputs(arrived, scheduler, num_ahead, groups)
    for request, grammar in grammars:
        output = request.token_ids[request.num_prompt_tokens :].tolist()
        if request.finish_reason == "stop" and request.stop_token_ids:
            del output[-1]  # a stop token is not of the grammar
        assert grammar.followed == output


def check_outputs(
    asked: list[tuple[Arrival, tuple[int, str]]],
    scheduler: Scheduler,
    num_ahead: int,
    groups: Sequence[list[Request]] = (),
) -> None:
    groups = groups or [arrival.group(uid) for uid, (arrival, _) in enumerate(asked)]
    for group, (_, stop) in zip(groups, asked, strict=True):
        for request in group:
            _set_stop(request, *stop)
    aborted = serve(PagedOracle(scheduler, num_ahead), [arrival for arrival, _ in asked], groups)
    for group, (_, (token_id, kind)) in zip(groups, asked, strict=True):
        for request in group:
            expected = expected_output(
                request.token_ids[: request.num_prompt_tokens], request.max_tokens, request.index
            )
            reason = "length"
            if kind in ("token", "string") and token_id in expected:
                expected = expected[: expected.index(token_id) + 1]
                reason = "stop"
            if request.uid in aborted and request.finish_reason == "abort":
                expected = expected[: request.num_output_tokens]
            else:
                assert request.finish_reason == reason
            assert request.token_ids[request.num_prompt_tokens :].tolist() == expected
    scheduler.kv_cache.check_idle()


def _set_stop(request: Request, token_id: int, kind: str) -> None:
    if kind == "token":
        request.stop_token_ids = frozenset([token_id])
    elif kind == "string":
        request.output.stop_checker = StopString(token_id)  # type: ignore[assignment]
    elif kind == "host":
        request.bad_words = BadWords([[VOCAB]])
