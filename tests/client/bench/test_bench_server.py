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


def test_servers_under_load(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    script = Path(__file__).parent / "openai_server.py"
    peers = [
        f"--peer=fake={sys.executable} {script} {{model}} --port {{port}}",
        "--peer=missing=/nonexistent/server {port}",
    ]
    shape = ["--tiny", "--rounds=1", "--workload=W2,W5", "--through=engine,completions"]
    variant = "--trident=small=max_num_seqs=2"
    output = _trident(*shape, variant, *peers, f"--json={file}", f"--report={tmp_path / 'report'}")
    figures = json.loads(file.read_text())
    ours = ["trident-engine", "trident-completions", "small"]
    measured = [(row["workload"], row["server"]) for row in figures["summary"]]
    assert measured == [(w, s) for w in ("W2", "W5") for s in (*ours, "fake")]
    for row in figures["summary"]:
        assert row["start"] > 0
        assert row["latency"][0] >= row["ttft"][0] > 0
        assert row["memory"] > (1e6 if row["server"] == "fake" else 1e8)
        assert set(row["ratios"]) == set(ours)
        assert row["failed"] == 0
    runs = {(run["server"], run["workload"]): run["measurement"] for run in figures["runs"]}
    assert {run["num_tokens"] for run in runs.values()} == {4 * 8}
    assert set(runs["fake", "W2"]["cpu_seconds"]) >= {"load generator"}
    assert "engine alone" in runs["trident-engine", "W2"]["cpu_seconds"]
    for sample in runs["trident-engine", "W5"]["metrics"]["samples"]:
        assert sample[4] is None or 0 <= sample[4] < 1  # None once nothing runs
    through_gateway = runs["trident-completions", "W2"]
    assert set(through_gateway["cpu_seconds"]) >= STAGES | {"gateway"}
    assert figures["failures"] == {"missing": "missing: /nonexistent/server is not installed"}
    assert "missing has not all its figures" in output
    assert "data:image/png" in (tmp_path / "report" / "index.html").read_text()
