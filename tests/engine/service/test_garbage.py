"""Garbage collection in processes that serve; in processes of their own, as it cannot be undone."""

import subprocess
import sys

_SPARED = """
import gc, weakref
from engine.service.garbage import spare_startup_objects
before = [[] for _ in range(100_000)]
spare_startup_objects()
assert gc.get_freeze_count() > 100_000
assert len(gc.get_objects()) < 10_000
class Cycle: pass
cycle = Cycle()
cycle.itself = cycle
gone = []
weakref.finalize(cycle, gone.append, True)
del cycle
keep = []
while not gone:
    keep.append([])
    assert len(keep) < 1_000_000, "no automatic collection"
"""

_SERVED = """
import gc, socket
from engine.config.engine_config import EngineConfig
from engine.protocol.messages import FromEngine, Ready, Shutdown, Start, ToEngine
from engine.protocol.channel import Channel
from engine.service.process.serve import serve
from tests.engine.service.stub.fake_engine import FakeCore
ours, theirs = socket.socketpair()
channel = Channel(ours, FromEngine)
channel.send(Start(EngineConfig().model_dump()))
channel.send(Shutdown())
assert serve(theirs, FakeCore) == 0
assert gc.get_freeze_count() > 10_000
"""


def _run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_what_exists_is_spared_and_later_cycles_are_collected() -> None:
    _run(_SPARED)


def test_the_engine_process_spares_its_model() -> None:
    _run(_SERVED)
