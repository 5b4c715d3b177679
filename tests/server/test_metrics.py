"""What an operator sees: /metrics, log lines and traces of one server, around known requests."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.launch import server_log
from engine.launch.server import TritonServer
from tests.server.caller import Caller, InferError
from tests.server.conftest import MAX_MODEL_LEN
from tests.server.engine_process import engine_process
from tests.server.otlp import Collector, Span
from tests.server.scraping import Change, assert_idle, scrape
from tests.waiting import eventually

pytestmark = pytest.mark.server

NUM_SEQS = 4
NUM_QUEUED = 3
SECRET = "tangerine"
HISTOGRAMS = (  # vLLM's, as its dashboards ask for them
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
    *("request_params_n", "request_params_max_tokens"),
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(checkpoint: Path, collector: Collector) -> Iterator[TritonServer]:
    settings = {
        "model": str(checkpoint),
        "dtype": "float32",
        "num_gpu_blocks_override": 40,  # too few for four long sequences
        "max_num_seqs": NUM_SEQS,
        "max_num_queued_reqs": NUM_QUEUED,
        "log_format": "json",
    }
    tracing = (
        "mode=opentelemetry",
        "rate=1",
        "level=TIMESTAMPS",
        f"opentelemetry,url={collector.url}",
        "opentelemetry,resource=service.name=trident",
        "opentelemetry,bsp_schedule_delay=200",
    )
    arguments = [f"--trace-config={each}" for each in tracing]
    with TritonServer(settings, arguments=arguments, ports=0, start_timeout_s=120) as server:
        yield server


def long_inputs(**params: Any) -> dict[str, Any]:
    return {"sampling_parameters": json.dumps({"ignore_eos": True, **params})}


def test_every_series_is_there_from_the_start(server: TritonServer, checkpoint: Path) -> None:
    assert eventually(lambda: scrape(server)["cache_config_info"] == 1)
    numbers = scrape(server)
    for name in HISTOGRAMS:
        assert {f"{name}_sum", f"{name}_count", f"{name}_bucket +Inf"} <= numbers.keys()
    for reason in ("stop", "length", "abort", "error"):
        assert f"request_success_total {reason}" in numbers
    assert_idle(server)
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        assert f'model_name="{checkpoint.name}"' in response.read().decode()


def test_sums_are_exact_over_streams_samples_and_repeated_prompts(
    server: TritonServer, caller: Caller
) -> None:
    change = Change(server)
    figures = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    prompt = f"{SECRET} " * 8
    inputs = {"text_input": prompt, "max_tokens": 12, "stream": True, **figures, **long_inputs()}
    responses = caller.collect(**inputs)
    assert sum(each["num_output_tokens"][0] for each in responses) == 12
    num_prompt = responses[0]["num_input_tokens"][0]
    for _ in range(2):
        caller.one(text_input=prompt, max_tokens=5, num_return_sequences=3, **long_inputs())
    caller.one("engine", input_ids=[5, 6, 7], sampling_parameters='{"max_tokens": 1}')

    num_sequences, num_tokens = 1 + 3 + 3 + 1, 12 + 2 * 3 * 5 + 1
    seen = change.becomes(
        prompt_tokens_total=7 * num_prompt + 3,
        generation_tokens_total=num_tokens,
        prefix_cache_queries_total=3 * num_prompt + 3,
        request_success_total__length=num_sequences,
        request_success_total__stop=0,
        request_success_total__abort=0,
        request_success_total__error=0,
        time_to_first_token_seconds_count=num_sequences,
        inter_token_latency_seconds_count=num_tokens - num_sequences,
        e2e_request_latency_seconds_count=num_sequences,
        request_prompt_tokens_sum=7 * num_prompt + 3,
        request_generation_tokens_sum=num_tokens,
        request_params_n_count=4,
        request_params_n_sum=1 + 3 + 3 + 1,
        request_params_max_tokens_sum=12 + 5 + 5 + 1,
        num_preemptions_total=0,
    )
    assert seen["prefix_cache_hits_total"] == 2 * ((num_prompt - 1) // 16 * 16) > 0
    for name in HISTOGRAMS:
        assert seen[f"{name}_bucket +Inf"] == seen[f"{name}_count"]
    assert seen["request_generation_tokens_bucket 10.0"] == num_sequences - 1  # but the one of 12
    assert_idle(server)


def test_what_runs_waits_is_preempted_and_turned_away(server: TritonServer, caller: Caller) -> None:
    change = Change(server)
    num_tokens, num_more = 480, 2 * NUM_QUEUED

    def ask(ids: list[int]) -> Iterator[dict[str, list[Any]]]:
        inputs = long_inputs(max_tokens=num_tokens)
        return caller.stream("engine", input_ids=ids, stream=True, **inputs)

    def is_busy() -> bool:
        numbers = scrape(server)
        return (
            numbers["num_requests_running"] > 0
            and numbers["num_requests_waiting"] > 0
            and 0 < numbers["kv_cache_usage_perc"] <= 1
        )

    with ThreadPoolExecutor(NUM_SEQS + num_more) as pool:
        running = [ask([3 + i] * 20) for i in range(NUM_SEQS)]
        for stream in running:
            next(stream)
        answers = [pool.submit(list, ask([9 + i] * 20)) for i in range(num_more)]
        answers += [pool.submit(list, stream) for stream in running]
        assert eventually(is_busy)
        errors = [str(e) for each in answers if (e := each.exception()) is not None]
    assert errors
    assert all("Maximum queue size" in error for error in errors)
    num_streams = len(answers) - len(errors)
    seen = change.becomes(
        generation_tokens_total=num_streams * num_tokens,
        prompt_tokens_total=num_streams * 20,
        request_success_total__length=num_streams,
        time_to_first_token_seconds_count=num_streams,
        requests_refused_total__queue_full=len(errors),
        request_params_n_count=num_streams,
        num_requests_running=0,
    )
    assert seen["num_preemptions_total"] > 0
    # What was preempted is computed again, so steps take more tokens than there are.
    assert seen["iteration_tokens_total_sum"] > num_streams * (20 + num_tokens - 1)
    assert_idle(server)


@pytest.mark.parametrize("model", ["ensemble", "engine"])
def test_a_cancelled_request_counts_as_aborted(
    server: TritonServer, caller: Caller, model: str
) -> None:
    change = Change(server)
    prompt = {"text_input": SECRET} if model == "ensemble" else {"input_ids": [5, 6, 7]}
    inputs = {**prompt, **long_inputs(max_tokens=480, n=2)}
    with closing(caller.stream(model, stream=True, request_id=f"left-{model}", **inputs)) as stream:
        next(stream)
    seen = change.becomes(
        request_success_total__abort=2,
        request_success_total__length=0,
        request_params_n_count=1,
        e2e_request_latency_seconds_count=0,
        num_requests_running=0,
        kv_cache_usage_perc=0,
    )
    assert 0 < seen["generation_tokens_total"] < 2 * 480
    assert_idle(server)
    (line,) = request_lines(server, f"left-{model}")
    assert line["event"] == "request cancelled"
    assert line["fields"]["finish_reason"] == "abort"
    uid = line["fields"]["uid"]
    loggers = {each["logger"] for each in own_lines(server) if each["fields"].get("uid") == uid}
    assert loggers == {"trident.request", "trident.engine"}


def own_lines(server: TritonServer) -> list[dict[str, Any]]:
    lines = [line for line in server.log.splitlines() if server_log.parse(line).from_engine]
    return [json.loads(line) for line in lines]


def request_lines(server: TritonServer, request_id: str) -> list[dict[str, Any]]:
    return [each for each in own_lines(server) if each["fields"].get("request_id") == request_id]


def test_each_request_is_found_in_the_log_by_its_id_without_its_text(
    server: TritonServer, caller: Caller
) -> None:
    change = Change(server)
    inputs = long_inputs(max_tokens=6)
    caller.collect(request_id="plain", text_input=SECRET, stream=True, **inputs)
    with pytest.raises(InferError, match="max_model_len"):
        caller.collect("engine", request_id="long", input_ids=[1] * MAX_MODEL_LEN)
    body = json.dumps({"id": "over-http", "input_ids": [1] * MAX_MODEL_LEN})
    url = f"http://{server.http_url}/v2/models/engine/generate"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(url, body.encode(), timeout=10)
    change.becomes(requests_refused_total__invalid=2, request_params_n_count=1)

    (line,) = request_lines(server, "plain")
    assert line["event"] == "request finished"
    fields = line["fields"]
    assert (fields["finish_reason"], fields["output_tokens"]) == ("length", 6)
    assert 0 <= fields["queue_s"] <= fields["ttft_s"] <= fields["e2e_s"]
    for request_id in ("long", "over-http"):
        (line,) = request_lines(server, request_id)
        assert line["event"] == "request refused"
        assert "max_model_len" in line["fields"]["error"]
    assert SECRET not in server.log


def test_traces_follow_a_request_through_the_stages(
    server: TritonServer, caller: Caller, collector: Collector
) -> None:
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    body = {"text_input": "Hello", "max_tokens": 8, "stream": True}
    request = urllib.request.Request(
        f"http://{server.http_url}/v2/models/ensemble/generate_stream",
        json.dumps(body).encode(),
        {"traceparent": f"00-{trace_id}-{parent_id}-01"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()

    def spans() -> dict[str, Span]:
        return {span.name: span for span in collector.spans if span.trace_id == trace_id}

    stages = {"tokenizer", "engine", "detokenizer"}
    assert eventually(lambda: {"InferRequest", "ensemble", *stages} <= spans().keys())
    found = spans()
    assert found["InferRequest"].parent_id == parent_id
    assert found["ensemble"].parent_id == found["InferRequest"].span_id
    for stage in stages:
        assert found[stage].parent_id == found["ensemble"].span_id
        assert found[stage].seconds <= found["ensemble"].seconds
    assert {span.service for span in found.values()} == {"trident"}
    # Of the test before: over gRPC a client can name its request.
    named = [s for s in collector.spans if s.attributes.get("triton.request_id") == "plain"]
    assert stages <= {span.name for span in named}


def error_of(stream: Iterator[Any]) -> str:
    try:
        list(stream)
    except InferError as error:
        return str(error)
    return ""


def test_the_death_of_the_engine_counts_what_it_took_along(
    server: TritonServer, caller: Caller
) -> None:
    change = Change(server)
    process = engine_process(server)
    inputs = {"stream": True, **long_inputs(max_tokens=480)}
    streams = [caller.stream("engine", input_ids=[9, i], **inputs) for i in range(NUM_SEQS)]
    for stream in streams:
        next(stream)
    process.kill()
    errors = [error for stream in streams if (error := error_of(stream))]
    assert errors
    assert all("died" in error for error in errors)
    assert eventually(lambda: scrape(server)["engine_up"] == 0)
    assert scrape(server)["num_requests_running"] == 0
    assert scrape(server)["kv_cache_usage_perc"] == 0
    with pytest.raises(InferError, match="engine process"):
        caller.one("engine", input_ids=[1])
    assert eventually(lambda: scrape(server)["engine_up"] == 1, 60)
    caller.one("engine", input_ids=[1], sampling_parameters='{"max_tokens": 1}')
    change.becomes(
        request_success_total__error=len(errors),
        requests_refused_total__engine_down=1,
        engine_restarts_total=1,
    )
    assert_idle(server)
