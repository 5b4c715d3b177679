"""OpenAI-compatible servers, started by a command from the user."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from client.bench.errors import BenchError
from client.bench.load.record import Target
from client.bench.load.scrape import DIRECT
from client.bench.servers.server import Running, Server, first_model
from engine.launch import child
from engine.launch.ports import pick_free
from engine.launch.processes import uninterrupted

_START_TIMEOUT_S = 900.0  # some compile for minutes
_END_TIMEOUT_S = 10.0
_POLL_S = 0.1
_LAST_LINES = 8


def peer(name: str, command: Sequence[str], model: Path) -> Server:
    """Return a server of the checkpoint in the folder `model`.

    Args:
        command: its words; `{model}` stands for the checkpoint's folder, `{port}` for a free port.
    """
    return Server(name, partial(_running, name, command, model))


@contextmanager
def _running(name: str, command: Sequence[str], model: Path) -> Iterator[Running]:
    (port,) = pick_free(1)
    url = f"http://127.0.0.1:{port}"
    words = [each.replace("{model}", str(model)).replace("{port}", str(port)) for each in command]
    if not words or shutil.which(words[0]) is None:
        raise BenchError(f"{name}: {' '.join(words[:1]) or 'the command'} is not installed")
    with tempfile.TemporaryFile() as log:

        def told(what: str) -> str:
            log.seek(0)
            lines = log.read().decode("utf-8", errors="replace").splitlines()
            last_words = "\n".join(lines[-_LAST_LINES:])
            return f"{name}: {what}; its last words:\n{last_words}"

        def end() -> str:
            status = process.poll()
            return "" if status is None else told(f"ended with status {status}")

        launched = time.monotonic()
        process = subprocess.Popen(
            child.tied(words, _END_TIMEOUT_S),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        target = Target("completions", f"{url}/v1", "")
        running = Running(target, launched, [process.pid], f"{url}/metrics", end=end)
        try:
            if not _becomes_ready(running):
                raise BenchError(told(f"was not ready after {_START_TIMEOUT_S:g} s"))
            yield running
        finally:
            with uninterrupted():
                _end(process)


def _becomes_ready(server: Running) -> bool:
    """Return whether `/models` lists a model, its target's from now on, and it does not answer 503.

    This takes one request before the first measured one.

    Raises:
        BenchError: the server has ended.
    """
    url, model = server.target.url, ""
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not (model and _is_loaded(url, model)):
        server.require_alive()
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
        with suppress(OSError, ValueError, LookupError, TypeError):
            model = model or first_model(url)
    server.target = Target("completions", url, model)
    return True


def _is_loaded(url: str, model: str) -> bool:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{url}/completions", body, {"content-type": "application/json"})
    try:
        DIRECT.open(asked, timeout=_START_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return error.code != 503  # llama.cpp's answer while it loads
    except OSError:
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all its descendants, with SIGTERM first."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    with suppress(ProcessLookupError):  # processes started since; the group has the first one's id
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()
    psutil.wait_procs(family, timeout=_END_TIMEOUT_S)
