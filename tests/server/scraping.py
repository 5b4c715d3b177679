"""The metrics of a running server, as numbers."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from engine.launch.server import TritonServer
from tests.waiting import eventually

Numbers = dict[str, float]


def scrape(server: TritonServer) -> Numbers:
    """Return our metrics by short name and the label that tells them apart, if there is one."""
    with urllib.request.urlopen(f"http://{server.metrics_url}/metrics", timeout=10) as response:
        text = response.read().decode()
    numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            prefix, _, name = sample.name.partition(":")
            if prefix in ("vllm", "trident"):
                # The parser gives every counter this ending, those of a histogram too.
                if name.endswith(("_bucket_total", "_sum_total", "_count_total")):
                    name = name.removesuffix("_total")
                labels = dict(sample.labels)
                assert labels.pop("model_name")
                assert (labels.pop("model"), labels.pop("version")) == ("engine", "1")
                tail = ",".join(labels.values()) if name != "cache_config_info" else ""
                numbers[f"{name} {tail}".strip()] = sample.value
    return numbers


def assert_idle(server: TritonServer) -> None:
    """Assert that nothing is left of requests that have ended; gauges are reported now and then."""
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    eventually(lambda: not any(scrape(server)[name] for name in gauges))
    numbers = scrape(server)
    assert {name: numbers[name] for name in gauges} == dict.fromkeys(gauges, 0)
    assert numbers["engine_up"] == 1


class Change:
    """What has changed since it was made, of what is asked for."""

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._before = scrape(server)

    def now(self) -> Numbers:
        after = scrape(self._server)
        assert after.keys() == self._before.keys()
        return {name: after[name] - self._before[name] for name in after}

    def becomes(self, **expected: float) -> Numbers:
        """Wait until all of `expected` have changed by so much; return all changes."""
        names = {name.replace("__", " "): value for name, value in expected.items()}

        def seen(change: Numbers) -> Numbers:
            return {name: change[name] for name in names}

        eventually(lambda: seen(self.now()) == names)
        change = self.now()
        assert seen(change) == names
        return change
