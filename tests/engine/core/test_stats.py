import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.request import Request
from engine.core.stats import HISTOGRAM_BOUNDS, Histogram, StatsRecorder
from engine.protocol.messages import Stats
from tests.factories.paged_oracle import PagedOracle
from tests.factories.requests import make_request, make_scheduler

BOUNDS = (0.0, 1.0, 2.5, 10.0)


@given(st.lists(st.floats(-1, 20) | st.sampled_from(BOUNDS)))
def test_an_observation_falls_into_the_first_bucket_whose_bound_it_does_not_exceed(
    observations: list[float],
) -> None:
    histogram = Histogram(BOUNDS)
    for value in observations:
        histogram.observe(value)
    delta = histogram.take()
    if not observations:
        assert delta is None
        return
    assert delta is not None
    assert list(itertools.accumulate(delta.counts)) == [
        sum(value <= bound for value in observations) for bound in (*BOUNDS, float("inf"))
    ]
    # `sum` corrects rounding errors from Python 3.12 on.
    assert delta.sum == functools.reduce(operator.add, observations, 0.0)
    assert histogram.take() is None


class Engine:
    """The scheduler and the recorder as `EngineCore` joins them, on the oracle as a model."""

    def __init__(self, num_blocks: int) -> None:
        self.scheduler = make_scheduler(num_blocks=num_blocks, max_num_batched_tokens=12)
        self.oracle = PagedOracle(self.scheduler)
        self.recorder = StatsRecorder()
        self.num_computed = 0

    def add(self, uid: int, prompt: Iterable[int], n: int, max_tokens: int) -> list[Request]:
        siblings = [
            make_request(uid, list(prompt), max_tokens=max_tokens, index=index, n=n)
            for index in range(n)
        ]
        self.scheduler.add(siblings)
        self.recorder.accepted(siblings)
        return siblings

    def step(self) -> None:
        schedule = self.scheduler.schedule()
        num_tokens = schedule.total_num_tokens
        result = self.scheduler.update(self.oracle.execute(schedule))
        self.recorder.stepped(num_tokens, result)
        for request in result.finished:
            self.recorder.finished(request)
        self.num_computed += num_tokens

    def abort(self, uid: int) -> None:
        for request in self.scheduler.abort(uid):
            self.recorder.finished(request)

    def take(self) -> Stats:
        return self.recorder.take(self.scheduler)


requests = st.tuples(
    st.integers(0, 3).flatmap(
        lambda family: st.integers(1, 20).map(
            lambda length: range(100 * family, 100 * family + length)
        )
    ),
    st.integers(1, 3),  # n
    st.integers(1, 12),  # max_tokens
)
events = st.lists(
    requests | st.integers(1, 8).map(lambda uid: ("abort", uid)) | st.sampled_from(["step", "take"])
)


def total(reports: list[Stats], field: str) -> int:
    return sum(getattr(stats, field) for stats in reports)


@given(events, st.integers(12, 30))
@settings(deadline=None)
def test_the_reports_add_up_to_what_happened(events: list[object], num_blocks: int) -> None:
    engine = Engine(num_blocks)
    sequences: list[Request] = []
    num_requests = 0
    reports = []
    for event in events:
        if event == "step" and engine.scheduler.unfinished:
            engine.step()
        elif event == "take":
            reports.append(engine.take())
            running = {id(r) for r in engine.scheduler.running}
            assert reports[-1].num_running == len(running)
            assert reports[-1].num_waiting == sum(
                r.finish_reason is None and id(r) not in running for r in sequences
            )
        elif isinstance(event, tuple) and event[0] == "abort":
            engine.abort(event[1])
        elif isinstance(event, tuple):
            num_requests += 1
            sequences += engine.add(num_requests, *event)
    while engine.scheduler.unfinished:
        engine.step()
    reports.append(engine.take())

    last = reports[-1]
    assert (last.num_running, last.num_waiting, last.kv_cache_usage) == (0, 0, 0.0)
    begun = [r for r in sequences if r.num_output_tokens]
    outputs = sum(r.num_output_tokens for r in sequences)
    assert total(reports, "num_prompt_tokens") == sum(r.num_prompt_tokens for r in begun)
    assert total(reports, "num_generation_tokens") == outputs
    assert total(reports, "num_preemptions") == sum(r.num_preemptions for r in sequences)
    assert total(reports, "num_prefix_hits") <= total(reports, "num_prefix_queries")

    reasons: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    for stats in reports:
        reasons.update(stats.num_finished)
        for name, delta in stats.histograms.items():
            assert len(delta.counts) == len(HISTOGRAM_BOUNDS[name]) + 1
            counts[name] += sum(delta.counts)
            sums[name] += delta.sum
    assert reasons == Counter(r.finish_reason for r in sequences)

    completed = [r for r in sequences if r.finish_reason != "abort"]
    assert counts["time_to_first_token_seconds"] == len(begun)
    assert counts["inter_token_latency_seconds"] == outputs - len(begun)
    assert sums["iteration_tokens_total"] == engine.num_computed
    assert counts["request_params_n"] == counts["request_params_max_tokens"] == num_requests
    assert sums["request_params_n"] == len(sequences)
    assert sums["request_prompt_tokens"] == sum(r.num_prompt_tokens for r in completed)
    assert sums["request_generation_tokens"] == sum(r.num_output_tokens for r in completed)
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert counts[f"{name}_seconds"] == len(completed)
    several = sum(r.num_output_tokens > 1 for r in completed)
    assert counts["request_time_per_output_token_seconds"] == several
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    whole = sums["e2e_request_latency_seconds"]
    assert abs(sum(sums[f"{part}_seconds"] for part in parts) - whole) < 1e-6


def test_a_prompt_counts_as_one_lookup_however_many_samples_share_it() -> None:
    engine = Engine(num_blocks=30)
    for uid in (1, 2):
        engine.add(uid, range(10), n=2, max_tokens=2)
        while engine.scheduler.unfinished:
            engine.step()
    stats = engine.take()
    assert stats.num_prompt_tokens == 40
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (20, 8)


def test_the_imbalance_of_experts_is_of_the_choices_since_the_last_call() -> None:
    recorder, scheduler = StatsRecorder(), make_scheduler()
    found = []
    for counts in (
        None,
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 1, 1], [4, 0, 0, 0]],
        [[3, 2, 1, 2], [5, 1, 1, 1]],
        [[3, 2, 1, 2], [5, 1, 1, 1]],
    ):
        array = None if counts is None else np.array(counts)
        found.append(recorder.take(scheduler, array).expert_imbalance)
    assert found == [0, 0, 4, 2, 0]
