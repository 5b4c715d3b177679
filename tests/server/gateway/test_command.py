"""`trident gateway` as a process of its own."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from engine.launch.ports import pick_free
from engine.launch.server import TritonServer
from tests.factories.readmes import ROOT, Example, examples
from tests.server.gateway.test_operation import call
from tests.waiting import eventually

pytestmark = pytest.mark.server


def answers(address: str) -> bool:
    try:
        return call(address, "/health")[0] == 200
    except OSError:
        return False


COMMANDS = [e for e in examples() if e.text.startswith(".venv/bin/trident gateway")]
PAGE = (ROOT / "client/gateway/README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", COMMANDS, ids=str)
def test_a_command_of_the_readme(server: TritonServer, example: Example, tmp_path: Path) -> None:
    """The second of two servers is not there."""
    port, nobody = pick_free(2)
    keys = tmp_path / "keys.toml"
    blocks = [part.split("```")[0] for part in PAGE.split("```toml")[1:]]
    (given,) = (block for block in blocks if "sha256" in block)
    keys.write_text(given)
    text = example.text.replace("localhost:8001", server.grpc_url).replace("9000", str(port))
    text = text.replace("localhost:8011", f"localhost:{nobody}").replace("keys.toml", str(keys))
    command = [sys.executable, "-m", "client.cli", *shlex.split(text)[1:]]
    command += ["--model-name", "one", "--model-name", "two"]
    address = f"127.0.0.1:{port}"
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "NO_COLOR": "1"}
    ) as process:
        try:
            assert eventually(lambda: process.poll() is not None or answers(address), 60)
            with OpenAI(base_url=f"http://{address}/v1", api_key="alice's key") as client:
                assert [model.id for model in client.models.list()] == ["one", "two"]
                asked = json.dumps({"prompt": "One two"}).encode()
                key = {"content_type": "application/json", "x_api_key": "alice's key"}
                status, found, _ = call(address, "/tokenize", asked, **key)
                assert (status, found["count"]) == (200, len(found["tokens"]))
                asked = json.dumps({"tokens": found["tokens"]}).encode()
                assert call(address, "/detokenize", asked, **key)[1] == {"prompt": "One two"}
                stream = client.completions.create(
                    model="one", prompt="a", max_tokens=400, stream=True
                )
                next(iter(stream))
                process.send_signal(signal.SIGTERM)
                # It ends the answer first.
                *_, last = list(stream)
                assert last.choices[0].finish_reason in ("stop", "length")
            assert process.wait(30) in (0, -signal.SIGTERM)
            assert process.stderr is not None
            assert "POST /v1/completions 200 " in process.stderr.read()
        finally:
            process.kill()
