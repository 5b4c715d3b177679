"""EngineMetrics: the engine's statistics at the server's /metrics, in vLLM's names.

Histograms are published as counters `X_bucket{le}`, `X_sum` and `X_count`, their form on the
wire: Triton's own histograms take one value per round trip, too expensive per token; counters take
all values of an interval at once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.core.stats import HISTOGRAM_BOUNDS
from engine.errors import EngineDeadError, QueueFullError, RequestError, SuspectRequestError
from engine.protocol.messages import HistogramDelta, Ready, Stats

_GAUGES = {
    "num_running": ("num_requests_running", "Sequences that are running."),
    "num_waiting": ("num_requests_waiting", "Sequences that are waiting to run."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1."),
}
_COUNTERS = {
    "num_prompt_tokens": ("prompt_tokens_total", "Prompt tokens processed."),
    "num_generation_tokens": ("generation_tokens_total", "Tokens generated."),
    "num_preemptions": ("num_preemptions_total", "Preempted sequences."),
    "num_prefix_queries": ("prefix_cache_queries_total", "Tokens looked up in the prefix cache."),
    "num_prefix_hits": ("prefix_cache_hits_total", "Tokens found in the prefix cache."),
    "num_drafts": (
        "spec_decode_num_drafts_total",
        "Drafts, each of one or more tokens of a sequence.",
    ),
    "num_draft_tokens": ("spec_decode_num_draft_tokens_total", "Tokens in drafts."),
    "num_accepted_tokens": (
        "spec_decode_num_accepted_tokens_total",
        "Draft tokens that were accepted.",
    ),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from arrival to the first token.",
    "inter_token_latency_seconds": "Seconds between two tokens of a sequence.",
    "request_time_per_output_token_seconds": "Seconds per token after the first, by sequence.",
    "e2e_request_latency_seconds": "Seconds from arrival to the last token.",
    "request_queue_time_seconds": "Seconds from arrival to the first step.",
    "request_inference_time_seconds": "Seconds from the first step to the last token.",
    "request_prefill_time_seconds": "Seconds from the first step to the first token.",
    "request_decode_time_seconds": "Seconds from the first token to the last.",
    "iteration_tokens_total": "Tokens computed in one step.",
    "request_prompt_tokens": "Prompt tokens of a sequence.",
    "request_generation_tokens": "Tokens generated for a sequence.",
    "request_params_max_tokens": "max_tokens of a request.",
    "request_params_n": "n of a request.",
}
_FINISH_REASONS = ("stop", "length", "abort", "error")
_REFUSALS = ("invalid", "queue_full", "engine_down", "suspect", "internal")

log = logging.getLogger("trident.metrics")

PUBLISH_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 2.0

Metric = Any  # pb_utils.Metric


class MetricBoard:
    """Collects updates, and sends them to the server from its own thread.

    Each update of a metric is a round trip of some 20 us (measured with release 24.10), so all
    updates of a metric in one interval go in one: the cost is bounded, whatever the load.
    Thread-safe; only the creation of a metric waits for the server. Never update a metric inside
    `execute`: release 24.10 then sometimes dies of a `lock_exception`. Failed updates are retried.
    """

    def __init__(
        self,
        make_family: Any,
        labels: Mapping[str, str],
        interval_s: float = PUBLISH_INTERVAL_S,
    ) -> None:
        """Start the thread.

        Args:
            make_family: `pb_utils.MetricFamily`.
            labels: of every metric.
            interval_s: seconds between rounds.
        """
        self._make_family = make_family
        self._labels = dict(labels)
        self._interval_s = interval_s
        self._families: dict[str, Any] = {}
        self._calling = threading.Lock()  # one call into the server at a time
        self._lock = threading.Lock()  # of the two below
        self._added: dict[Metric, float] = {}
        self._set: dict[Metric, float] = {}
        self._pending = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def counter(self, name: str, description: str, **labels: str) -> Metric:
        """Return a metric that `add` adds to, at 0."""
        return self._metric(self._make_family.COUNTER, name, description, labels)

    def gauge(self, name: str, description: str, **labels: str) -> Metric:
        """Return a metric that `set` sets, at 0."""
        return self._metric(self._make_family.GAUGE, name, description, labels)

    def add(self, counter: Metric, amount: float) -> None:
        """Add to `counter`, soon."""
        with self._lock:
            self._added[counter] = self._added.get(counter, 0.0) + amount
        self._pending.set()

    def set(self, gauge: Metric, value: float) -> None:
        """Set `gauge`, soon."""
        with self._lock:
            self._set[gauge] = value
        self._pending.set()

    def close(self) -> None:
        """Publish what is pending, and end the thread."""
        self._closing.set()
        self._pending.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _metric(self, kind: Any, name: str, description: str, labels: Mapping[str, str]) -> Metric:
        with self._calling:
            if name not in self._families:
                self._families[name] = self._make_family(
                    name=name, description=description, kind=kind
                )
            return self._families[name].Metric(labels={**self._labels, **labels})

    def _run(self) -> None:
        while not self._closing.is_set():
            self._pending.wait()
            self._pending.clear()
            self._publish()
            self._closing.wait(self._interval_s)
        self._publish()  # what came in that last interval

    def _publish(self) -> None:
        """Send all pending updates to the server; those that fail stay pending."""
        with self._lock:
            added, self._added = self._added, {}
            values, self._set = self._set, {}
        try:
            for counter in list(added):
                with self._calling:
                    counter.increment(added[counter])
                del added[counter]
            for gauge in list(values):
                with self._calling:
                    gauge.set(values[gauge])
                del values[gauge]
        except Exception:
            log.exception("the metrics could not be updated; they are tried again")
            with self._lock:
                for counter, amount in added.items():
                    self._added[counter] = self._added.get(counter, 0.0) + amount
                self._set = {**values, **self._set}
            self._pending.set()


def served_model_name(config: EngineConfig) -> str:
    """Return the `model_name` label: by default the setting `model`, of a folder only its name."""
    if config.served_model_name is not None:
        return config.served_model_name
    return Path(config.model).resolve().name if Path(config.model).is_dir() else config.model


def refusal_reason(error: Exception) -> str:
    """Return the `reason` label of a request that was answered with `error` alone."""
    match error:
        case RequestError():
            return "invalid"
        case QueueFullError():
            return "queue_full"
        case EngineDeadError():
            return "engine_down"
        case SuspectRequestError():
            return "suspect"
    return "internal"


class _Histogram:
    def __init__(
        self, board: MetricBoard, name: str, description: str, bounds: tuple[float, ...]
    ) -> None:
        self._board = board
        self._buckets = [
            board.counter(f"{name}_bucket", description, le=le)
            for le in (*map(repr, bounds), "+Inf")
        ]
        self._sum = board.counter(f"{name}_sum", description)
        self._count = board.counter(f"{name}_count", description)

    def add(self, delta: HistogramDelta) -> None:
        cumulative = list(accumulate(delta.counts))
        self._board.add(self._count, cumulative[-1])
        self._board.add(self._sum, delta.sum)
        # From the top: a scrape between two updates finds no bucket above a wider one.
        for bucket, count in zip(reversed(self._buckets), reversed(cumulative), strict=True):
            if count:
                self._board.add(bucket, count)


class EngineMetrics:
    """An `Observer` of the engine client; its methods return at once, from any thread."""

    def __init__(
        self,
        config: EngineConfig,
        make_family: Any,
        *,
        model: str,
        version: str,
        interval_s: float = PUBLISH_INTERVAL_S,
    ) -> None:
        """Make every metric, at 0.

        Args:
            make_family: `pb_utils.MetricFamily`.
            model, version: of the Triton model that serves the engine, for the labels.
            interval_s: seconds between updates.
        """
        self._config = config
        labels = {"model_name": served_model_name(config), "model": model, "version": version}
        self._board = board = MetricBoard(make_family, labels, interval_s)
        self._gauges = {
            field: board.gauge(f"vllm:{name}", text) for field, (name, text) in _GAUGES.items()
        }
        self._gauges["expert_imbalance"] = board.gauge(
            "trident:expert_imbalance",
            "Load of the busiest expert over the mean load, in the layer where that is highest.",
        )
        self._gauges["num_state_checkpoints"] = board.gauge(
            "trident:state_checkpoints",
            "Checkpoints of states that prompts can begin with.",
        )
        self._counters = {
            field: board.counter(f"vllm:{name}", text) for field, (name, text) in _COUNTERS.items()
        }
        self._counters["num_prefix_lost"] = board.counter(
            "trident:prefix_cache_lost_tokens_total",
            "Tokens whose KV was found in the prefix cache, but no state behind them.",
        )
        self._finished = {
            reason: board.counter(
                "vllm:request_success_total", "Sequences that have ended.", finished_reason=reason
            )
            for reason in _FINISH_REASONS
        }
        self._histograms = {
            name: _Histogram(board, f"vllm:{name}", _HISTOGRAMS[name], bounds)
            for name, bounds in HISTOGRAM_BOUNDS.items()
        }
        self._refused = {
            reason: board.counter(
                "trident:requests_refused_total", "Requests answered with an error.", reason=reason
            )
            for reason in _REFUSALS
        }
        self._cache: Metric | None = None
        self._up = board.gauge("trident:engine_up", "Whether the engine takes requests, 0 or 1.")
        ranks = config.tensor_parallel_size if config.tensor_parallel_size > 1 else 0
        self._ranks_up = [
            board.gauge("trident:rank_up", "Whether the rank computes, 0 or 1.", rank=str(rank))
            for rank in range(ranks)
        ]
        self._rank_waits = [
            board.counter(
                "trident:rank_sum_wait_seconds_total",
                "Seconds that the rank has waited for others within steps.",
                rank=str(rank),
            )
            for rank in range(ranks)
        ]
        self._restarts = board.counter(
            "trident:engine_restarts_total", "Restarts of the engine process."
        )

    def update(self, stats: Stats) -> None:
        """Take the statistics since the last call."""
        for field, gauge in self._gauges.items():
            self._board.set(gauge, getattr(stats, field))
        for field, counter in self._counters.items():
            self._add(counter, getattr(stats, field))
        for reason, count in stats.num_finished.items():
            self._add(self._finished[reason], count)
        for name, delta in stats.histograms.items():
            self._histograms[name].add(delta)
        for counter, wait_s in zip(self._rank_waits, stats.rank_waits_s, strict=False):
            self._add(counter, wait_s)

    def engine_up(self, ready: Ready) -> None:
        """Publish that requests are served, and the KV cache, in the labels of a metric."""
        for gauge in (self._up, *self._ranks_up):
            self._board.set(gauge, 1)
        labels = {
            "block_size": str(ready.block_size),
            "num_gpu_blocks": str(ready.num_blocks),
            "enable_prefix_caching": str(self._config.enable_prefix_caching),
            "gpu_memory_utilization": str(self._config.gpu_memory_utilization),
            "cache_dtype": self._config.kv_cache_dtype,
        }
        if self._cache is not None:  # a new process may have found less free memory
            self._board.set(self._cache, 0)
        text = "The KV cache; 1 for the one in use."
        self._cache = self._board.gauge("vllm:cache_config_info", text, **labels)
        self._board.set(self._cache, 1)

    def engine_down(self) -> None:
        """Publish that no request is served now."""
        for gauge in (self._up, *self._ranks_up, *self._gauges.values()):
            self._board.set(gauge, 0)

    def engine_restarted(self) -> None:
        """Count a start of the process after the first."""
        self._board.add(self._restarts, 1)

    def requests_lost(self, count: int) -> None:
        """Count sequences that ended with the engine process."""
        self._add(self._finished["error"], count)

    def request_refused(self, error: Exception) -> None:
        """Count a request that was answered with `error` alone."""
        self._board.add(self._refused[refusal_reason(error)], 1)

    def close(self) -> None:
        """Publish what is pending, and end."""
        self._board.close()

    def _add(self, counter: Metric, amount: float) -> None:
        if amount:
            self._board.add(counter, amount)
