"""Whatever else is scheduled, each request gets the tokens that it gets alone."""

from hypothesis import given
from hypothesis import strategies as st

from engine.core.bad_words import BadWords
from engine.core.request import Request
from tests.factories.paged_oracle import VOCAB, PagedOracle, expected_output
from tests.factories.requests import StopString, make_request, make_scheduler

_ARRIVALS = st.lists(
    st.tuples(
        st.integers(0, 12),  # step of arrival
        st.integers(1, 30),  # prompt length
        st.integers(0, 3),  # which of few prompts, so that prefixes are shared
        st.integers(1, 12),  # max_tokens
        st.integers(1, 4),  # n
        st.integers(-1, 1),  # priority
        st.one_of(st.none(), st.integers(0, 25)),  # step of abort
        # A token that stops it; on the device too, or known to the host alone; or the host has
        # a part in choosing every token.
        st.tuples(st.integers(0, VOCAB - 1), st.sampled_from(["none", "token", "string", "host"])),
    ),
    min_size=1,
    max_size=8,
)


@given(
    arrivals=_ARRIVALS,
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(6, 40),
    caching=st.booleans(),
    threshold=st.sampled_from([0, 5]),
    policy=st.sampled_from(["fcfs", "priority"]),
    num_ahead=st.sampled_from([0, 1]),
    num_host_blocks=st.one_of(st.just(0), st.integers(1, 60)),
)
def test_outputs_do_not_depend_on_company(
    arrivals: list[tuple[int, int, int, int, int, int, int | None, tuple[int, str]]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    caching: bool,
    threshold: int,
    policy: str,
    num_ahead: int,
    num_host_blocks: int,
) -> None:
    """Random arrivals, forks, stops, aborts, preemptions: everybody gets what they get alone."""
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        long_prefill_token_threshold=threshold,
        policy=policy,
        num_host_blocks=num_host_blocks,
    )
    oracle = PagedOracle(scheduler, num_ahead)
    groups = {}
    for uid, (_, length, which, max_tokens, n, priority, _, stop) in enumerate(arrivals):
        prompt = [which * 10 + i % 7 for i in range(length)]
        groups[uid] = [
            make_request(uid, prompt, max_tokens=max_tokens, index=i, priority=priority)
            for i in range(n)
        ]
        for request in groups[uid]:
            _set_stop(request, *stop)
    aborted = set()
    for step in range(26):
        for uid, (arrival, *_, abort, _) in enumerate(arrivals):
            if arrival == step:
                scheduler.add(groups[uid])
            if abort == step and abort > arrival and scheduler.abort(uid):
                aborted.add(uid)
        if oracle.has_work():
            oracle.step()
    oracle.run()
    for uid, group in groups.items():
        token_id, kind = arrivals[uid][-1]
        for request in group:
            expected = expected_output(
                request.token_ids[: request.num_prompt_tokens], request.max_tokens, request.index
            )
            reason = "length"
            if kind in ("token", "string") and token_id in expected:
                expected = expected[: expected.index(token_id) + 1]
                reason = "stop"
            if uid in aborted and request.finish_reason == "abort":
                expected = expected[: request.num_output_tokens]
            else:
                assert request.finish_reason == reason
            assert request.token_ids[request.num_prompt_tokens :].tolist() == expected
    assert scheduler.kv_cache.pool.num_free == scheduler.kv_cache.pool.num_usable
    assert scheduler.kv_cache.host_pool.num_free == num_host_blocks


def _set_stop(request: Request, token_id: int, kind: str) -> None:
    if kind == "token":
        request.stop_token_ids = frozenset([token_id])
    elif kind == "string":
        request.output.stop_checker = StopString(token_id)  # type: ignore[assignment]
    elif kind == "host":
        request.bad_words = BadWords([[VOCAB]])
