"""What `trident serve` shows of the server's log, how it names itself, and what it suggests."""

from __future__ import annotations

import io
import json
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from client.commands.announcement import curl_line, own_name
from client.commands.server_display import ServerLog, stopped_by_signals

DIED = "2026-11-20 16:56:00.000 WARNING trident.engine: the engine process hung; starting it"
READY = "2026-11-20 16:56:09.000 INFO trident.engine: demo, KV cache for 64 tokens"


def test_a_restart_is_shown_from_its_reason_to_its_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    log = ServerLog(console)
    with log.loading("Starting"):
        log.show(READY)
    assert isinstance(console.file, io.StringIO)
    console.file.truncate(0)
    log.show(DIED)
    log.show(READY)
    shown = console.file.getvalue().strip("\0").splitlines()
    assert shown == ["the engine process hung; starting it", "The engine is ready again."]


@pytest.mark.parametrize("is_there", [False, True])
def test_complaint_about_a_missing_gpu_is_shown_beside_a_gpu_alone(
    monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    monkeypatch.setattr("client.commands.server_display.has_gpu", lambda: is_there)
    console = Console(file=io.StringIO(), width=80)
    log = ServerLog(console, everything=True)
    lines = [
        'E1120 16:36:57.3 1 server.cc:241] "CudaDriverHelper has not been initialized."',
        'E1120 16:36:57.4 1 server.cc:99] "disk full"',
    ]
    for line in lines:
        log.show(line)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == (lines if is_there else lines[1:])


def test_own_name_is_a_path_where_the_shell_does_not_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [".venv/bin/trident", "serve"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_name() == ".venv/bin/trident"
    (tmp_path / "trident").touch(0o755)
    assert own_name() == "trident"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_interrupt(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), stopped_by_signals():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_what_nohup_made_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("model", "embeds", "field"),
    [
        ("demo", False, "messages"),
        ("/models/a", False, "text_input"),
        ("/models/a", True, "sampling_parameters"),
    ],
)
def test_the_model_can_answer_it(model: str, embeds: bool, field: str) -> None:
    server: Any = SimpleNamespace(
        config=SimpleNamespace(model=model), http_url="localhost:8000", model="ensemble"
    )
    *_, body = shlex.split(curl_line(server, embeds=embeds))
    asked = json.loads(body)
    assert field in asked
    assert ("return_embedding" in body) == embeds == ("max_tokens" not in asked)
