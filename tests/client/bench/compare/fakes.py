"""A fake peer, made-up figures, and one measurement."""

import asyncio
import sys
from pathlib import Path

from client.bench.compare.ceilings import Ceilings
from client.bench.compare.load import first_token, run_workload
from client.bench.compare.measurement import Measurement, Request
from client.bench.compare.peer import Peer, PeerCommand
from client.bench.cpu import OTHERS, STOLEN
from client.bench.load.prompts import PromptSource
from client.bench.load.scrape import Metrics
from client.bench.load.workload import Workload
from engine.demo import CHECKPOINT_DIR

SCRIPT = Path(__file__).parents[1] / "openai_server.py"
CEILINGS = Ceilings(read=1e9, bf16=1e12, int8=4e12)


def fake_peer(*flags: str, name: str = "fake") -> Peer:
    command = (sys.executable, str(SCRIPT), "{model}", "--port", "{port}", *flags)
    return Peer(PeerCommand(name, command), CHECKPOINT_DIR)


def measure(peer: Peer, workload: Workload, source: PromptSource) -> tuple[float, Measurement]:
    with peer:
        start = asyncio.run(first_token(peer, source, "first"))
        return start, run_workload(peer, workload, source, "seed")


def fake_measurement(seconds: float, others: float = 0.0) -> Measurement:
    used = {OTHERS: 0.0, STOLEN: 0.0}
    requests = [Request(0, first, first + 0.5, 8, 0, 10, 0.05) for first in (0.1, 0.3)]
    return Measurement(
        *(100, seconds, requests, [0.02], 50, 0, 0, "", 2 * 10**9, used, others),
        stolen=0.04,
        limit="",
        metrics=Metrics(),
    )
