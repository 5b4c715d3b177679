"""`trident bench` against the real server: a short run of each command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.server, pytest.mark.slow]

STAGES = {"tritonserver", "tokenizer stub", "engine stub", "detokenizer stub", "engine process"}


def _trident(*arguments: str) -> str:
    """Run the command; return its output."""
    command = [sys.executable, "-m", "client.cli", "bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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


def test_servers_under_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    script = Path(__file__).parent / "openai_server.py"
    peers = [
        f"--peer=fake={sys.executable} {script} {{model}} --port {{port}}",
        "--peer=missing=/nonexistent/server {port}",
    ]
    shape = ["--tiny", "--rounds=1", "--workload=W2,W5", "--through=grpc,http,completions"]
    variant = "--trident=small=max_num_seqs=2"
    output = _trident(*shape, variant, *peers, f"--json={file}", f"--report={tmp_path / 'report'}")
    figures = json.loads(file.read_text())
    ours = ["trident", "trident-http", "trident-completions", "small"]
    measured = [(row["workload"], row["server"]) for row in figures["summary"]]
    assert measured == [(w, s) for w in ("W2", "W5") for s in (*ours, "fake")]
    for row in figures["summary"]:
        assert row["start"] > 0
        assert row["latency"][0] >= row["ttft"][0] > 0
        assert row["memory"] > (1e6 if row["server"] == "fake" else 1e8)
        assert set(row["ratios"]) == set(ours)
        assert row["failed"] == 0
    for server in (*ours, "fake"):
        measurements = figures["rounds"][server][0]["measurements"]
        assert measurements["W2"]["num_tokens"] == 4 * 8
        assert measurements["W5"]["num_tokens"] == 4 * 8
    assert set(measurements["W2"]["cpu_seconds"]) >= {"client"}
    through_gateway = figures["rounds"]["trident-completions"][0]["measurements"]["W2"]
    assert set(through_gateway["cpu_seconds"]) >= STAGES | {"gateway"}
    assert figures["failures"] == {"missing": "missing: /nonexistent/server is not installed"}
    assert "missing has not all its figures" in output
    assert "data:image/png" in (tmp_path / "report" / "index.html").read_text()
