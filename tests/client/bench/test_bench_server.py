"""`trident bench` against the real server: a short run of each command."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from client.bench import genai_perf, perf_analyzer
from client.bench.errors import BenchError
from client.bench.tools import ToolEnvironment
from engine.launch.server import TritonServer

pytestmark = [pytest.mark.server, pytest.mark.slow]

STAGES = {"tritonserver", "tokenizer stub", "engine stub", "detokenizer stub", "engine process"}


def _trident(*arguments: str) -> str:
    """Run the command; return its output."""
    command = [sys.executable, "-m", "client.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer({"model": "demo"}, ports=0, start_timeout_s=120) as server:
        yield server


def test_stages(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    shape = ["--streams=1,4", "--prompt-tokens=20", "--max-tokens=12", "--waves=2", "--rounds=1"]
    output = _trident("stages", *shape, f"--json={file}")
    figures = json.loads(file.read_text())
    assert [row["streams"] for row in figures["summary"]] == [1, 4]
    for row in figures["summary"]:
        assert row["ratio"]["median"] > 0
        assert row["ttft"][1] >= row["ttft"][0] > 0
        assert set(row["ensemble_cpu"]) >= STAGES | {"client"}
        assert row["engine_cpu"]["engine process"] > 0
    for streams in (1, 4):
        (measured,) = figures["rounds"][str(streams)]
        for side in ("engine", "ensemble"):
            assert [wave["num_tokens"] for wave in measured[side]] == [12 * streams] * 2
        for wave in measured["ensemble"]:
            assert len(wave["ttfts"]) == streams
            assert wave["num_responses"] == len(wave["gaps"]) + streams
    assert "Engine alone and through the ensemble" in output
    assert "CPU seconds per 1000 output tokens" in output


def test_gateway(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    shape = ["--streams=1,4", "--prompt-tokens=20", "--max-tokens=12", "--waves=1", "--rounds=1"]
    output = _trident("gateway", *shape, f"--json={file}")
    figures = json.loads(file.read_text())
    assert [row["streams"] for row in figures["summary"]] == [1, 4]
    for row in figures["summary"]:
        assert row["ratio"]["median"] > 0
        assert row["gateway_ttft"] > 0
        assert row["grpc_ttft"] > 0
        (measured,) = figures["rounds"][str(row["streams"])]
        for side in ("grpc", "gateway"):
            (wave,) = measured[side]
            assert wave["num_tokens"] == 12 * row["streams"]
            assert set(wave["cpu_seconds"]) >= STAGES | {"client", "gateway"}
    assert "through the gateway" in output


def test_stages_at_a_set_rate(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    output = _trident(
        *("stages", "--device=null:20", "--streams=2,8", "--prompt-tokens=20", "--seconds=1"),
        f"--json={file}",
    )
    rows = json.loads(file.read_text())
    assert [row["streams"] for row in rows] == [2, 8]
    for row in rows:
        assert row["intended"] == row["streams"] * 50
        assert 0 < row["tokens_per_second"] < 1.5 * row["intended"]
        assert row["gap"][1] >= row["gap"][0] >= 0.005
        assert set(row["cpu_per_response"]) >= STAGES | {"client"}
        assert 0 <= row["generator_busy"] < 1
    assert "no model is computed" in output


def test_compare(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    script = Path(__file__).parent / "openai_server.py"
    peers = [
        f"--peer=fake={sys.executable} {script} {{model}} --port {{port}}",
        "--peer=missing=/nonexistent/server {port}",
    ]
    shape = ["--tiny", "--rounds=1", "--workloads=W2,W5"]
    variant = "--trident=small=max_num_seqs=2"
    output = _trident("compare", *shape, variant, *peers, f"--json={file}")
    figures = json.loads(file.read_text())
    measured = [(row["workload"], row["server"]) for row in figures["summary"]]
    assert measured == [(w, s) for w in ("W2", "W5") for s in ("trident", "small", "fake")]
    for row in figures["summary"]:
        assert row["start"] > 0
        assert row["ttft"][1] >= row["ttft"][0] > 0
        assert row["memory"] > (1e6 if row["server"] == "fake" else 1e8)
        assert set(row["ratios"]) == {"trident", "small"}
    for server in ("trident", "small", "fake"):
        measurements = figures["rounds"][server][0]["measurements"]
        assert measurements["W2"]["num_tokens"] == 4 * 8
        assert measurements["W5"]["num_tokens"] == 4 * 4
    assert set(measurements["W2"]["cpu_seconds"]) >= {"client"}
    assert set(figures["rounds"]["trident"][0]["measurements"]["W2"]["cpu_seconds"]) >= STAGES
    assert figures["failures"] == {"missing": "missing: /nonexistent/server is not installed"}
    assert "missing has not all its figures" in output


def test_perf_analyzer(server: TritonServer) -> None:
    try:
        perf_analyzer.find_or_install(Console())
    except BenchError as error:
        pytest.skip(str(error))
    arguments = ["--streams", "4", "--requests", "12", "--max-tokens", "8"]
    output = _trident("perf-analyzer", "--url", server.grpc_url, *arguments)
    assert "Request count: 12" in output
    for model in ("tokenizer", "engine", "detokenizer"):
        assert f"{model}, version: 1" in output
    assert "Concurrency: 4, throughput: " in output


@pytest.mark.parametrize("backend", ["tensorrtllm", "vllm"])
def test_genai_perf(server: TritonServer, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ToolEnvironment(genai_perf.NAME_AND_VERSION, Console()).is_installed:
        pytest.skip("genai-perf is not installed; trident bench genai-perf does it (1 GB)")
    monkeypatch.setenv("COLUMNS", "120")
    arguments = f"--backend {backend} --streams 2 --requests 4 --max-tokens 8".split()
    output = _trident("genai-perf", "--url", server.grpc_url, *arguments)
    assert "NVIDIA GenAI-Perf | LLM Metrics" in output
    assert "Output Sequence Length" in output
