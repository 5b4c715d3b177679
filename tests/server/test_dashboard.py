"""Whether the dashboard and the alerts ask for metrics that the server really has."""

import re
from urllib import request

import pytest

from engine.launch.server import TritonServer
from tests.docker.files import metric_names
from tests.server.caller import Caller

pytestmark = pytest.mark.server


def test_every_metric_is_exposed(server: TritonServer, caller: Caller) -> None:
    caller.one(text_input="Hello", max_tokens=2)
    with request.urlopen(f"http://{server.metrics_url}/metrics", timeout=30) as response:
        text = response.read().decode()
    exposed = set(re.findall(r"^([a-z_]+:\w+)\{", text, re.MULTILINE))
    assert metric_names() <= exposed
