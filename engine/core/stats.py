"""StatsRecorder: counters and histograms for the server's metrics.

They count sequences, like vLLM's, with vLLM's names and buckets. Imports no torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.update_from_output import UpdateResult
from engine.protocol.messages import HistogramDelta, Stats

_LATENCY_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_LENGTH_BOUNDS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))

# Upper bounds of the buckets, by the metric's name without its prefix; seconds or tokens.
HISTOGRAM_BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
        *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
    ),
    "inter_token_latency_seconds": _TOKEN_BOUNDS,
    "request_time_per_output_token_seconds": _TOKEN_BOUNDS,
    "e2e_request_latency_seconds": _LATENCY_BOUNDS,
    "request_queue_time_seconds": _LATENCY_BOUNDS,
    "request_inference_time_seconds": _LATENCY_BOUNDS,
    "request_prefill_time_seconds": _LATENCY_BOUNDS,
    "request_decode_time_seconds": _LATENCY_BOUNDS,
    "iteration_tokens_total": tuple(float(2**power) for power in (0, *range(3, 15))),
    "request_prompt_tokens": _LENGTH_BOUNDS,
    "request_generation_tokens": _LENGTH_BOUNDS,
    "request_params_max_tokens": _LENGTH_BOUNDS,
    "request_params_n": (1.0, 2.0, 5.0, 10.0, 20.0),
}


class Histogram:
    """Observations since the last `take`."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """One bucket up to each of `bounds`, ascending and inclusive, and one above the last."""
        self._bounds = np.array(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Add an observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Add an observation of each of `values`."""
        if len(values):
            buckets = self._bounds.searchsorted(values)
            for bucket, count in enumerate(np.bincount(buckets).tolist()):
                self._counts[bucket] += count
            self._sum += float(values.sum())

    def take(self) -> HistogramDelta | None:
        """Return the observations and reset; None if there were none."""
        if not any(self._counts):
            return None
        delta = HistogramDelta(self._counts, self._sum)
        self._counts, self._sum = [0] * len(self._counts), 0.0
        return delta


class StatsRecorder:
    """Records the events of each step, with a few operations per token and per sequence.

    Times to first token and between tokens are observed as the tokens come. Histograms per sequence
    count those that finished with "stop" or "length", not those aborted or failed.
    """

    def __init__(self) -> None:
        self._num_prompt_tokens = 0  # of the sequences that have got their first token
        self._num_generation_tokens = 0
        self._drafted: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()  # the totals at the last `take`
        self._num_finished: Counter[str] = Counter()
        self._expert_counts: NDArray[Any] | None = None  # at the last `take`
        self._histograms = {name: Histogram(each) for name, each in HISTOGRAM_BOUNDS.items()}

    def accepted(self, siblings: Sequence[Request]) -> None:
        """Count a request that joined the queue, by its sequences."""
        first, asked = siblings[0], siblings[0].sampling_params.max_tokens
        self._observe(
            request_params_n=first.sampling_params.n,
            request_params_max_tokens=first.max_tokens if asked is None else asked,
        )

    def stepped(self, num_tokens: int, result: UpdateResult) -> None:
        """Count a step that computed `num_tokens`, and the tokens that it gave.

        Without a step, 0, tokens are given that were late.
        """
        num_tokens_out = len(result.token_gaps_s) + result.num_forced
        for request in result.begun:
            assert request.times.first_token is not None
            self._num_prompt_tokens += request.num_prompt_tokens
            if request.sampling_params.max_tokens != 0:  # else the token is dropped
                num_tokens_out += 1
                wait_s = request.times.first_token - request.times.arrival
                self._observe(time_to_first_token_seconds=wait_s)
        self._num_generation_tokens += num_tokens_out
        if result.num_drafts:
            self._drafted.update(
                num_drafts=result.num_drafts,
                num_draft_tokens=result.num_draft_tokens,
                num_accepted_tokens=result.num_accepted_tokens,
            )
        self._histograms["inter_token_latency_seconds"].observe_all(result.token_gaps_s)
        if num_tokens:
            self._observe(iteration_tokens_total=num_tokens)

    def finished(self, request: Request) -> None:
        """Count `request` if it has ended; to be called once after that."""
        if request.finish_reason is not None:
            self._num_finished[request.finish_reason] += 1
            if request.finish_reason in ("stop", "length"):
                self._observe_life(request)

    def take(
        self,
        scheduler: Scheduler,
        expert_counts: NDArray[Any] | None = None,
        rank_waits_s: Sequence[float] = (),
    ) -> Stats:
        """Return the counters since the last call, and the gauges of `scheduler`.

        Args:
            expert_counts: int64 [mixtures, experts], how often each expert has been chosen so far.
            rank_waits_s: by rank, as in `Stats`.
        """
        totals = Counter(
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_prefix_queries=scheduler.num_prefix_queries,
            num_prefix_hits=scheduler.num_prefix_hits,
            num_prefix_lost=scheduler.num_prefix_lost,
            **self._drafted,
        )
        deltas, self._reported = totals - self._reported, totals
        finished, self._num_finished = dict(self._num_finished), Counter()
        pool, states = scheduler.kv_cache.pool, scheduler.kv_cache.states
        return Stats(
            num_running=len(scheduler.running),
            num_waiting=sum(map(len, scheduler.unfinished.values())) - len(scheduler.running),
            kv_cache_usage=1 - pool.num_free / pool.num_usable,
            num_state_checkpoints=0 if states is None else states.pool.num_cached,
            expert_imbalance=self._expert_imbalance(expert_counts),
            num_finished=finished,
            histograms={
                name: delta
                for name, histogram in self._histograms.items()
                if (delta := histogram.take()) is not None
            },
            rank_waits_s=list(rank_waits_s),
            **deltas,
        )

    def _expert_imbalance(self, counts: NDArray[Any] | None) -> float:
        """Return how unequally the experts were chosen since the last call; 0 if none was."""
        if counts is None:
            return 0.0
        before, self._expert_counts = self._expert_counts, counts
        chosen = counts if before is None else counts - before
        chosen = chosen[chosen.any(axis=1)]
        return float((chosen.max(axis=1) / chosen.mean(axis=1)).max()) if len(chosen) else 0.0

    def _observe_life(self, request: Request) -> None:
        arrival, scheduled = request.times.arrival, request.times.first_scheduled
        first_token, last_token = request.times.first_token, request.times.last_token
        if scheduled is None or first_token is None:
            return  # it never ran: no latencies
        self._observe(
            e2e_request_latency_seconds=last_token - arrival,
            request_queue_time_seconds=scheduled - arrival,
            request_inference_time_seconds=last_token - scheduled,
            request_prefill_time_seconds=first_token - scheduled,
            request_decode_time_seconds=last_token - first_token,
            request_prompt_tokens=request.num_prompt_tokens,
            request_generation_tokens=request.num_output_tokens,
        )
        if (num_gaps := request.num_output_tokens - 1) > 0:
            mean_s = (last_token - first_token) / num_gaps
            self._observe(request_time_per_output_token_seconds=mean_s)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)
