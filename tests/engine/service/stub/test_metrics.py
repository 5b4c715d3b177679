from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config.engine_config import EngineConfig
from engine.core.stats import HISTOGRAM_BOUNDS, Histogram
from engine.errors import EngineDeadError, QueueFullError, RequestError
from engine.protocol.messages import Ready, Stats
from engine.service.stub.metrics import EngineMetrics, MetricBoard, served_model_name

Key = tuple[str, frozenset[tuple[str, str]]]
READY = Ready(512, 100, 200, 16, 3184, 64, "")
LABELS = {"model_name": "m", "model": "engine", "version": "1"}


class FakeServer:
    """The metrics of a server as Triton keeps them: counters only grow, gauges are set."""

    def __init__(self) -> None:
        self.values: dict[Key, float] = {}
        self.kinds: dict[str, str] = {}
        self.writers: set[str] = set()
        self.num_writes = 0
        self.on_write: Callable[[str], None] = lambda name: None

    def __getitem__(self, name: str) -> float:
        return self.value(name)

    def value(self, name: str, **labels: str) -> float:
        return self.values[(name, frozenset({**LABELS, **labels}.items()))]

    def write(self, key: Key, value: float) -> None:
        self.on_write(key[0])
        self.values[key] = value
        self.writers.add(threading.current_thread().name)
        self.num_writes += 1

    def family(self) -> type:
        server = self

        class MetricFamily:
            COUNTER, GAUGE = "counter", "gauge"

            def __init__(self, name: str, description: str, kind: str) -> None:
                assert name not in server.kinds, "made twice"
                assert description
                server.kinds[name] = kind
                self._name = name

            def Metric(self, labels: dict[str, str]) -> FakeMetric:  # noqa: N802
                return FakeMetric(server, self._name, labels)

        return MetricFamily


class FakeMetric:
    def __init__(self, server: FakeServer, name: str, labels: dict[str, str]) -> None:
        self._server = server
        self._kind = server.kinds[name]
        self._key = (name, frozenset(labels.items()))
        server.values[self._key] = 0

    def increment(self, amount: float) -> None:
        assert self._kind == "counter"
        assert amount >= 0
        self._server.write(self._key, self._server.values[self._key] + amount)

    def set(self, value: float) -> None:
        assert self._kind == "gauge"
        self._server.write(self._key, value)


def make(server: FakeServer, interval_s: float = 0.0, num_ranks: int = 1) -> EngineMetrics:
    config = EngineConfig(model="m", tensor_parallel_size=num_ranks)
    return EngineMetrics(
        config, server.family(), model="engine", version="1", interval_s=interval_s
    )


observed = st.dictionaries(
    st.sampled_from(sorted(HISTOGRAM_BOUNDS)),
    st.lists(st.floats(0, 3000), min_size=1, max_size=5),
)


@given(st.lists(observed, max_size=4))
@settings(deadline=None, max_examples=40)
def test_a_histogram_is_what_a_program_would_have_observed(
    reports: list[dict[str, list[float]]],
) -> None:
    server = FakeServer()
    metrics = make(server)

    errors = []

    def check(written: str) -> None:
        for name, bounds in HISTOGRAM_BOUNDS.items():
            if written.startswith(f"vllm:{name}"):
                le = [*map(repr, bounds), "+Inf"]
                counts = [server.value(f"vllm:{name}_bucket", le=each) for each in le]
                if counts != sorted(counts) or server[f"vllm:{name}_count"] < counts[-1]:
                    errors.append(name)

    server.on_write = check
    for report in reports:
        deltas = {}
        for name, values in report.items():
            histogram = Histogram(HISTOGRAM_BOUNDS[name])
            for value in values:
                histogram.observe(value)
            delta = histogram.take()
            assert delta is not None
            deltas[name] = delta
        metrics.update(Stats(0, 0, 0.0, histograms=deltas))
    metrics.close()
    assert not errors, "who reads between two updates finds a histogram that cannot be"
    for name, bounds in HISTOGRAM_BOUNDS.items():
        values = [value for report in reports for value in report.get(name, [])]
        assert server[f"vllm:{name}_count"] == len(values)
        assert server[f"vllm:{name}_sum"] == pytest.approx(sum(values))
        assert server.value(f"vllm:{name}_bucket", le="+Inf") == len(values)
        for bound in bounds:
            expected = sum(value <= bound for value in values)
            assert server.value(f"vllm:{name}_bucket", le=repr(bound)) == expected


def test_counters_add_up_and_gauges_are_the_newest() -> None:
    server = FakeServer()
    metrics = make(server)
    for num_running in (3, 1):
        metrics.update(
            Stats(
                num_running,
                2,
                0.5,
                num_running / 2,
                num_prompt_tokens=10,
                num_finished={"stop": 1, "abort": 2},
            )
        )
    metrics.close()
    assert server["vllm:num_requests_running"] == 1
    assert server["vllm:kv_cache_usage_perc"] == 0.5
    assert server["trident:expert_imbalance"] == 0.5
    assert server["vllm:prompt_tokens_total"] == 20
    assert server["vllm:generation_tokens_total"] == 0
    reasons = {
        reason: server.value("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert reasons == {"stop": 2, "length": 0, "abort": 4, "error": 0}


def test_the_death_of_the_engine() -> None:
    server = FakeServer()
    metrics = make(server)
    metrics.engine_up(READY)
    metrics.update(Stats(3, 2, 0.5))
    metrics.engine_down()
    metrics.requests_lost(5)
    metrics.engine_restarted()
    metrics.close()
    assert server["trident:engine_up"] == 0
    assert server["trident:engine_restarts_total"] == 1
    assert server.value("vllm:request_success_total", finished_reason="error") == 5
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server[f"vllm:{gauge}"] == 0


def test_ranks_are_up_with_the_engine_and_their_waits_add_up() -> None:
    server = FakeServer()
    metrics = make(server, num_ranks=2)
    metrics.engine_up(READY)
    for _ in range(2):
        metrics.update(Stats(0, 0, 0.0, rank_waits_s=[0.5, 0.25]))
    metrics.close()
    assert [server.value("trident:rank_up", rank=rank) for rank in "01"] == [1, 1]
    waits = [server.value("trident:rank_sum_wait_seconds_total", rank=rank) for rank in "01"]
    assert waits == [1.0, 0.5]


def test_ranks_are_down_with_the_engine() -> None:
    server = FakeServer()
    metrics = make(server, num_ranks=2)
    metrics.engine_up(READY)
    metrics.engine_down()
    metrics.close()
    assert [server.value("trident:rank_up", rank=rank) for rank in "01"] == [0, 0]


def test_refusals_count_by_reason() -> None:
    server = FakeServer()
    metrics = make(server)
    for error in (RequestError("a"), QueueFullError("b"), RequestError("c"), KeyError("d")):
        metrics.request_refused(error)
    metrics.request_refused(EngineDeadError("e"))
    metrics.close()
    counts = {
        reason: server.value("trident:requests_refused_total", reason=reason)
        for reason in ("invalid", "queue_full", "engine_down", "suspect", "internal")
    }
    assert counts == {"invalid": 2, "queue_full": 1, "engine_down": 1, "suspect": 0, "internal": 1}


def test_the_cache_is_described_in_labels_and_anew_when_the_engine_is() -> None:
    server = FakeServer()
    metrics = make(server)
    for num_blocks in (200, 150, 200, 100):
        metrics.engine_up(msgspec.structs.replace(READY, num_blocks=num_blocks))
    metrics.close()
    found = [
        (dict(labels), value)
        for (name, labels), value in server.values.items()
        if name == "vllm:cache_config_info"
    ]
    assert {int(labels["num_gpu_blocks"]): value for labels, value in found} == {
        200: 0,
        150: 0,
        100: 1,
    }
    for labels, _ in found:
        assert (labels["block_size"], labels["cache_dtype"]) == ("16", "auto")


def test_a_folder_is_served_by_its_name_and_a_hub_id_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "Qwen").mkdir()
    assert served_model_name(EngineConfig(model=f"{tmp_path}/Qwen/")) == "Qwen"
    assert served_model_name(EngineConfig(model="Qwen/Qwen2.5-0.5B")) == "Qwen/Qwen2.5-0.5B"


def test_the_name_that_clients_call_is_the_label() -> None:
    assert served_model_name(EngineConfig(served_model_name="vllm_model")) == "vllm_model"


def test_updates_gather_while_the_server_is_slow_and_nobody_waits() -> None:
    server = FakeServer()
    going = threading.Event()
    entered = threading.Event()

    def block(name: str) -> None:
        entered.set()
        assert going.wait(60)

    server.on_write = block
    board = MetricBoard(server.family(), LABELS, interval_s=0.0)
    counter, gauge = board.counter("c", "a counter"), board.gauge("g", "a gauge")
    board.add(counter, 1)
    assert entered.wait(60)
    started = time.monotonic()
    for i in range(1000):
        board.add(counter, 1)
        board.set(gauge, i)
    assert time.monotonic() - started < 5
    going.set()
    board.close()
    assert (server["c"], server["g"]) == (1001, 999)
    assert server.num_writes == 3
    assert server.writers == {"metrics"}


def test_updates_that_fail_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    """A gauge that is set once, as the settings of the cache are, would stay at 0 for ever."""
    server = FakeServer()
    failing, failed = [True], threading.Event()

    def fail(name: str) -> None:
        if failing:
            failed.set()
            raise RuntimeError("no")

    server.on_write = fail
    board = MetricBoard(server.family(), LABELS, interval_s=0.001)
    counter, gauge = board.counter("c", "a counter"), board.gauge("g", "a gauge")
    board.add(counter, 1)
    board.set(gauge, 1)
    assert failed.wait(60)
    board.add(counter, 2)
    board.set(gauge, 7)
    failing.clear()
    board.close()
    assert (server["c"], server["g"]) == (3, 7)
    assert "could not be updated" in caplog.text


def test_the_server_is_asked_one_thing_at_a_time() -> None:
    """Making a metric while another is updated is what a start does."""
    server, inside = FakeServer(), threading.Lock()

    def enter(name: str) -> None:
        assert inside.acquire(blocking=False)
        time.sleep(0.0001)
        inside.release()

    server.on_write = enter
    family = server.family()

    class Family(family):  # type: ignore[valid-type, misc]
        def Metric(self, labels: dict[str, str]) -> FakeMetric:  # noqa: N802
            enter("")
            return super().Metric(labels)  # type: ignore[no-any-return]

    board = MetricBoard(Family, LABELS, interval_s=0.0)
    gauges = []
    for number in range(100):
        gauges.append(board.gauge(f"g{number}", "a gauge"))
        board.set(gauges[0], number)
    board.close()
    assert server["g0"] == 99
