"""Load generators of others measure the server by the README's lines, where they are installed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.gateway.settings import GatewaySettings
from engine.launch.server import TritonServer
from tests.factories.readmes import ROOT, Example, examples
from tests.server.gateway.running import running

pytestmark = [pytest.mark.server, pytest.mark.slow]

LINES = [e for e in examples() if re.match(r"aiperf |genai-perf |perf_analyzer ", e.text)]
OTHERS = [e for e in LINES if not e.text.startswith("perf_analyzer ")]
PERF_ANALYZER = [e for e in LINES if e.text.startswith("perf_analyzer ")]
PREFIX = Path(sys.prefix) / "perf-analyzer"  # where `make develop` puts it
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{PREFIX / 'bin'}:{os.environ['PATH']}",
    "LD_LIBRARY_PATH": str(PREFIX / "nvidia" / "cuda_runtime" / "lib"),
}
STEP_MS = 20
MAX_TOKENS, REQUESTS = 32, 16  # as the lines have it


@contextmanager
def serving(**settings: object) -> Iterator[dict[str, str]]:
    """Yield where a server of the bundled model listens, by where the README says so."""
    with (
        TritonServer(settings, ports=0) as server,
        running(GatewaySettings((server.grpc_url,), model_names=("demo",))) as gateway,
    ):
        yield {
            "localhost:8000": server.http_url,
            "localhost:8001": server.grpc_url,
            "localhost:9000": gateway,
        }


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    with serving() as addresses:
        yield addresses


@pytest.fixture(scope="module")
def slow_addresses() -> Iterator[dict[str, str]]:
    """Of one whose steps take so long that a busy machine hardly matters."""
    with serving(device=f"null:{STEP_MS}") as addresses:
        yield addresses


@pytest.fixture(scope="module")
def our_median_s(slow_addresses: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> float:
    """The median time of an answer, by `trident bench`."""
    file = tmp_path_factory.mktemp("bench") / "bench.json"
    url = f"s=http://{slow_addresses['localhost:9000']}/v1"
    command = [sys.executable, "-m", "client.cli", "bench", "--model", "demo", "--url", url]
    command += ["--concurrency", "4", "--requests", str(REQUESTS), "--rounds", "1"]
    command += ["--prompt-tokens", "8", "--max-tokens", str(MAX_TOKENS), "--json", str(file)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)
    (summary,) = json.loads(file.read_text())["summary"]
    assert summary["failed"] == 0
    return float(summary["latency"][0])


def run(line: Example, addresses: dict[str, str], folder: Path) -> str:
    """Run a line of the README; return what it prints."""
    words = shlex.split(line.text)
    for said, actual in addresses.items():
        words = [word.replace(said, actual) for word in words]
    words = [str(ROOT / word) if (ROOT / word).exists() else word for word in words]
    done = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_has_a_line() -> None:
    assert [each.text.split()[0] for each in OTHERS] == ["aiperf", "genai-perf", "genai-perf"]
    ways = [re.findall(r"-i grpc|--streaming", each.text) for each in PERF_ANALYZER]
    assert ways == [["-i grpc", "--streaming"], [], ["-i grpc"]]


@pytest.mark.parametrize("line", OTHERS, ids=lambda line: line.text.split()[0])
def test_it_measures(line: Example, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tool = line.text.split()[0]
    if shutil.which(tool, path=ENVIRONMENT["PATH"]) is None:
        pytest.skip(f"{tool} is not installed")
    output = run(line, request.getfixturevalue("addresses"), tmp_path)
    assert re.search("throughput", output, re.IGNORECASE)


def can_run_perf_analyzer() -> bool:
    """Whether it is there, with its libraries."""
    program = shutil.which("perf_analyzer", path=ENVIRONMENT["PATH"])
    if program is None:
        return False
    asked = subprocess.run([program, "--version"], env=ENVIRONMENT, capture_output=True)
    return asked.returncode != 127  # a library is missing


@pytest.mark.skipif(
    not can_run_perf_analyzer(), reason="perf_analyzer: make develop; apt-get install libb64-0d"
)
@pytest.mark.parametrize("line", PERF_ANALYZER, ids=("stream", "http", "grpc"))
def test_perf_analyzer_measures_what_we_do(
    line: Example, slow_addresses: dict[str, str], our_median_s: float, tmp_path: Path
) -> None:
    output = run(line, slow_addresses, tmp_path)
    counts = re.findall(r"^ *Request count: (\d+)$", output, re.MULTILINE)
    assert counts == [str(REQUESTS)]
    (median,) = re.findall(r"p50 latency: (\d+) usec", output)
    assert int(median) / 1e6 >= 0.9 * MAX_TOKENS * STEP_MS / 1e3  # no token is missing
    assert 0.4 < int(median) / 1e6 / our_median_s < 2.5
