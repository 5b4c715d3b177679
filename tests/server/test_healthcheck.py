"""The image's health check against the real server."""

import subprocess
import sys

import pytest

from engine.launch.server import TritonServer
from tests.docker.files import DOCKER

pytestmark = pytest.mark.server


def test_a_token_comes(server: TritonServer) -> None:
    command = [sys.executable, DOCKER / "healthcheck", f"http://{server.http_url}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "healthy\n"), done.stderr
