"""Memory that a gateway keeps of the bodies that it has answered."""

import subprocess
import sys

# One large body is freed, then many of 1 MiB between small objects that stay.
SCRIPT = """
import sys
import psutil
from client.gateway.processes.server import give_back_large_bodies

if sys.argv[1] == "bounded":
    give_back_large_bodies()
before = psutil.Process().memory_full_info().uss
body = b"x" * (30 << 20)
del body
bodies, small = [], []
for _ in range(128):
    bodies.append(b"x" * (1 << 20))
    small.append(b"y" * 100_000)  # too large for the gaps that imports have left
bodies.clear()
print(psutil.Process().memory_full_info().uss - before)
"""


def kept_bytes(mode: str) -> int:
    command = [sys.executable, "-P", "-c", SCRIPT, mode]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_memory_of_large_bodies_is_given_back() -> None:
    assert kept_bytes("unbounded") > 100 << 20
    assert kept_bytes("bounded") < 40 << 20
