"""A gateway whose descriptors are used up goes on with the connections that it has."""

from __future__ import annotations

import http.client
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

from engine.launch.ports import pick_free
from tests.client.fake_triton import FakeTriton


def health(connection: http.client.HTTPConnection) -> int:
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    return answer.status


def begin(port: int) -> http.client.HTTPConnection:
    """Return a connection to a gateway, once it is up, that has been answered."""
    deadline = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            assert health(connection) == 200
            return connection
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_idle_connections_keep_no_others_waiting(triton: FakeTriton, tmp_path: Path) -> None:
    (port,) = pick_free(1)
    command = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh", sys.executable, "-m", "client.cli"]
    command += ["gateway", "--port", str(port), "--triton-url", triton.url]
    log = tmp_path / "log"
    with (
        log.open("wb") as file,
        subprocess.Popen(command, stderr=file) as process,
    ):
        try:
            earlier = begin(port)
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard > 256
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (64, 64))
            idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
            deadline = time.monotonic() + 3  # the first wave of retries is over
            while time.monotonic() < deadline:
                asked = time.monotonic()
                assert health(earlier) == 200
                assert time.monotonic() - asked < 1
            for each in (earlier, *idle):
                each.close()
            begin(port).close()
        finally:
            process.kill()
    assert 0 < log.read_text().count("socket.accept() out of system resource") < 20
