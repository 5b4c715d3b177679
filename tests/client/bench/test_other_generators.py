"""Load generators of others measure the server by the README's lines, where they are installed."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.factories.readmes import ROOT, Example, examples
from tests.server.gateway.running import running

pytestmark = [pytest.mark.server, pytest.mark.slow]

LINES = [e for e in examples() if re.match(r"aiperf |genai-perf |perf_analyzer ", e.text)]


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Where a server of the bundled model listens, by where the README says so."""
    with (
        TritonServer(ports=0) as server,
        running(GatewaySettings((server.grpc_url,), model_names=("demo",))) as gateway,
    ):
        yield {"localhost:8001": server.grpc_url, "localhost:9000": gateway}


def test_each_has_a_line() -> None:
    assert [each.text.split()[0] for each in LINES] == ["aiperf", "genai-perf", "perf_analyzer"]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.text.split()[0])
def test_it_measures(line: Example, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    words = shlex.split(line.text)
    # genai-perf runs the other.
    for tool in ("genai-perf", "perf_analyzer") if words[0] == "genai-perf" else words[:1]:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    for said, actual in request.getfixturevalue("addresses").items():
        words = [word.replace(said, actual) for word in words]
    words = [str(ROOT / word) if (ROOT / word).exists() else word for word in words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("throughput", done.stdout, re.IGNORECASE)
