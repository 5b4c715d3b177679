"""What the tests read of docker/."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "trident.json"
ALERTS = DOCKER / "prometheus" / "alerts.yaml"

# What Grafana puts in for its own variables.
_INTERVALS = {"$__rate_interval": "1m", "$__range": "30m", "$__interval": "15s"}


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def dashboard_expressions() -> Iterator[tuple[str, str]]:
    """Yield title and PromQL of every query, as Prometheus gets it."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            expression = target["expr"]
            for variable, value in _INTERVALS.items():
                expression = expression.replace(variable, value)
            yield panel["title"], re.sub(r"\$\w+", ".*", expression)


def alerts() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(ALERTS)["groups"] for rule in group["rules"]]


def metric_names() -> set[str]:
    """Return every metric that the dashboard or an alert reads of Trident."""
    expressions = [expression for _, expression in dashboard_expressions()]
    expressions += [rule["expr"] for rule in alerts()]
    return {name for each in expressions for name in re.findall(r"\b(?:vllm|trident):\w+", each)}
