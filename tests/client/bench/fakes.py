"""A fake peer, and one measurement."""

import sys
from pathlib import Path

from client.bench.load.prompts import PromptSource
from client.bench.load.record import Record
from client.bench.load.scrape import Metrics, Sample
from client.bench.load.workload import Workload
from client.bench.measure.cpu import OTHERS, STOLEN
from client.bench.measure.measurement import Measurement
from client.bench.measure.run import first_token, run_workload
from client.bench.servers.peer import peer
from client.bench.servers.server import Server
from engine.demo import CHECKPOINT_DIR

SCRIPT = Path(__file__).parent / "openai_server.py"


def fake_peer(*flags: str, name: str = "fake") -> Server:
    command = (sys.executable, str(SCRIPT), "{model}", "--port", "{port}", *flags)
    return peer(name, command, CHECKPOINT_DIR)


def measure(server: Server, workload: Workload, source: PromptSource) -> tuple[float, Measurement]:
    with server.start() as running:
        start = first_token(running, source, "first")
        return start, run_workload(running, workload, source, "seed")


def fake_measurement(seconds: float, others: float = 0.0) -> Measurement:
    used = {"server": 0.5, OTHERS: 0.0, STOLEN: 0.0}
    samples = [Sample(0.0, 1, 0, 0.3), Sample(0.5, 1, 0, 0.3, kv_waste=0.02)]
    requests = [Record(0, 0, 0.0, 0.0, 10, [(first, 1), (first + 0.5, 9)]) for first in (0.1, 0.3)]
    return Measurement(
        *(100, seconds, requests, 0, 0, "", 2 * 10**9, used, others),
        stolen=0.04,
        limit="",
        metrics=Metrics(samples),
    )
