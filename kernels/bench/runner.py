"""Runs cases in a measuring process, and starts another if it faults or hangs."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from kernels.bench.worker import MARK

WORKER = (sys.executable, "-m", "kernels.bench.worker")
# Longer than any case takes, including compilation of its kernels and torch.compile.
_SILENCE_SECONDS = 100.0
_GRACE_SECONDS = 15.0
_GIVE_UP_AFTER = 2  # consecutive processes that end before they begin a case


@dataclass(slots=True)
class Figures:
    """Measured figures: the ceilings, and each case's figures by its key.

    Attributes:
        changed: called after each change.
        lock: held while they change; several threads may measure.
    """

    ceilings: dict[str, float | None] = field(default_factory=dict)
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    changed: Callable[[], None] = lambda: None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, keys: Iterable[str], found: dict[str, Any]) -> None:
        """Set the figures of these cases."""
        with self.lock:
            self.cases |= dict.fromkeys(keys, found)
            self.changed()

    def without(self, keys: Iterable[str]) -> list[str]:
        """Return those of these cases that have no figures yet."""
        return [key for key in keys if key not in self.cases]


def measure(
    keys: Sequence[str],
    deadline: float,
    figures: Figures,
    *,
    say: Callable[[str], None],
    command: Sequence[str] = WORKER,
    silence: float = _SILENCE_SECONDS,
    grace: float = _GRACE_SECONDS,
) -> None:
    """Measure the cases named by `keys`, in this order, and add them to `figures`.

    A case that crashes its process has failed; the others are measured in another one.

    Args:
        deadline: by time.time(); no case begins after it.
        say: called for every case as it begins.
        command: starts the measuring process.
        silence: seconds without output after which that process is considered hung.
        grace: seconds after the deadline at which the process is killed.
    """
    left, end = list(keys), ""
    fruitless = 0
    while left and fruitless < _GIVE_UP_AFTER:
        if time.time() > deadline:
            leave_out(left, figures)
            return
        num_left = len(left)
        end = _run(left, deadline, figures, say, command, silence, grace)
        left = figures.without(left)
        fruitless = 0 if len(left) < num_left else fruitless + 1
        if left and not fruitless:
            say(f"measuring goes on in a new process: {end}")
    if left:
        figures.add(left, {"status": "failed", "reason": end})


def leave_out(keys: Iterable[str], figures: Figures) -> None:
    """Set that no time was left for these cases."""
    figures.add(keys, {"status": "left out", "reason": "no time was left"})


@contextmanager
def compiling(
    groups: Iterable[tuple[Sequence[str], Sequence[str]]], deadline: float
) -> Iterator[None]:
    """Inside the block, compile the kernels of each group of cases in a process; wait at the end.

    Triton compiles in the launching process, one kernel at a time. Measuring is sequential; it then
    finds the kernels in the cache.

    Args:
        groups: of each, the command that starts its process and the keys of its cases.
        deadline: by time.time(); processes still running then are killed.
    """
    processes = []
    for command, keys in groups:
        process = _start(command, subprocess.DEVNULL, subprocess.DEVNULL)
        processes.append(process)
        assert process.stdin is not None
        _request(process.stdin, {"cases": list(keys), "compile_only": True})
    try:
        yield
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.time(), 0))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _run(
    keys: list[str],
    deadline: float,
    figures: Figures,
    say: Callable[[str], None],
    command: Sequence[str],
    silence: float,
    grace: float,
) -> str:
    """Measure cases in one process until it ends; return how it ended."""
    request = {
        "cases": keys,
        "compile_only": False,
        "deadline": deadline,
        "ceilings": not figures.ceilings,
    }
    with (
        tempfile.TemporaryFile("w+") as log,
        _start(command, subprocess.PIPE, log) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        _request(process.stdin, request)
        running: str | None = None
        try:
            while (line := lines.get(timeout=_patience(deadline, silence, grace))) is not None:
                if not line.startswith(MARK):
                    continue
                message = json.loads(line.removeprefix(MARK))
                if "ceilings" in message:
                    with figures.lock:
                        figures.ceilings = message["ceilings"]
                elif "begins" in message:
                    running = message["begins"]
                    say(f"measuring {running}")
                else:
                    key, running = message.pop("case"), None
                    figures.add([key], message)
            process.wait()
            end = f"the measuring process ended with code {process.returncode}{_last_line(log)}"
        except queue.Empty:
            late = time.time() > deadline + grace
            end = "it did not end in time" if late else f"nothing was heard for {silence:.0f} s"
        finally:
            process.kill()
    if running is not None:
        figures.add([running], {"status": "failed", "reason": end})
    return end


def _patience(deadline: float, silence: float, grace: float) -> float:
    """Return how many seconds to wait for the next output."""
    return max(min(silence, deadline + grace - time.time()), 0.01)


def _start(command: Sequence[str], stdout: int, stderr: int | IO[str]) -> subprocess.Popen[str]:
    # torch.compile would start a process pool for the one or two kernels of a case.
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, env=environment
    )


def _request(stdin: IO[str], request: dict[str, Any]) -> None:
    with suppress(BrokenPipeError), stdin:  # the process has ended, which its output shows too
        json.dump(request, stdin)


def _read(stdout: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""
