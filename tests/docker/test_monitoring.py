"""The dashboard and the alerts: what Grafana and Prometheus would refuse."""

import shutil
import subprocess
from itertools import combinations
from pathlib import Path

import promql_parser
import pytest
import yaml

from tests.docker.files import (
    DOCKER,
    alerts,
    dashboard,
    dashboard_expressions,
    metric_names,
    read_yaml,
)
from tests.docker.promql_labels import mismatches

EXPRESSIONS = [*dashboard_expressions(), *((rule["alert"], rule["expr"]) for rule in alerts())]


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_expressions_are_promql(title: str, expression: str) -> None:
    promql_parser.parse(expression)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_vectors_that_meet_have_the_same_labels(title: str, expression: str) -> None:
    assert not list(mismatches(promql_parser.parse(expression)))


@pytest.mark.parametrize(
    ("expression", "matches"),
    [
        ("vllm:num_requests_waiting > 0 and up == 1", False),
        ("vllm:num_requests_waiting > 0 and on (instance) up == 1", True),
        ("vllm:num_requests_waiting > 0 unless on (le) up == 1", False),
        ("vllm:num_requests_waiting or sum by (instance) (vllm:num_requests_running)", False),
        ("rate(vllm:a_bucket[5m]) / rate(vllm:a_count[5m])", False),
        ("rate(vllm:a_bucket[5m]) / ignoring (le) rate(vllm:a_count[5m])", True),
        ("(histogram_quantile(0.5, rate(vllm:a_bucket[5m])) > 5) * -vllm:a_count", True),
        ("sum without (job) (vllm:a_count) + sum by (instance) (vllm:a_count)", False),
    ],
)
def test_labels_on_one_side_only_are_found(expression: str, matches: bool) -> None:
    assert matches == (not list(mismatches(promql_parser.parse(expression))))


def test_the_figures_that_operators_watch_are_there() -> None:
    assert metric_names() >= {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:request_success_total",
        "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket",
        "vllm:e2e_request_latency_seconds_bucket",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "trident:engine_up",
        "trident:engine_restarts_total",
    }


def test_panels_have_a_place_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, two in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= two["x"]
            or two["x"] + two["w"] <= one["x"]
            or one["y"] + one["h"] <= two["y"]
            or two["y"] + two["h"] <= one["y"]
        )
        assert apart, (one, two)


def test_panels_ask_the_source_that_is_provisioned() -> None:
    (source,) = read_yaml(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")[
        "datasources"
    ]
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"] == {"type": source["type"], "uid": source["uid"]}
    variables = dashboard()["templating"]["list"]
    assert all(variable["datasource"]["uid"] == source["uid"] for variable in variables)


def test_paths_and_services_meet() -> None:
    services = read_yaml(DOCKER / "compose.yaml")["services"]
    (provider,) = read_yaml(DOCKER / "grafana/provisioning/dashboards/trident.yaml")["providers"]
    mounts = [mount.split(":") for mount in services["grafana"]["volumes"]]
    sources = {target: source for source, target, *_ in mounts}
    home = Path(services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == provider["options"]["path"]
    assert (DOCKER / sources[str(home.parent)] / home.name).is_file()
    (scrape,) = read_yaml(DOCKER / "prometheus/prometheus.yaml")["scrape_configs"]
    (target,) = scrape["static_configs"][0]["targets"]
    assert target.split(":")[0] in services
    (source,) = read_yaml(DOCKER / "grafana/provisioning/datasources/prometheus.yaml")[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not on PATH; it is in Debian's package prometheus",
)
def test_prometheus_takes_them(tmp_path: Path) -> None:
    config = DOCKER / "prometheus" / "prometheus.yaml"
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    rules = [
        {"record": f"panel:{number}", "expr": expression}
        for number, (_, expression) in enumerate(dashboard_expressions())
    ]
    path = tmp_path / "dashboard.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    checked = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
