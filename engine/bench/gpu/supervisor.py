"""Has pieces of work done by a process, and by another one if it faults or hangs.

The process reads a request from its standard input, JSON with the `keys` of what is left (null:
all that it finds) and the `deadline`. It answers by `say`: `keys` if it was asked for all, `begins`
with a key, `ends` with a key and figures. Other output is ignored.
"""

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
from typing import IO, Any, TextIO

import torch

_MARK = "@@ "
_GIVE_UP_AFTER = 2  # consecutive processes that end before they end anything


def say(message: dict[str, Any], out: TextIO | None = None) -> None:
    """Send a message from the process to its supervisor, by default to standard output."""
    print(f"\n{_MARK}{json.dumps(message)}", file=out or sys.stdout, flush=True)


def usable() -> bool:
    """Return whether the GPU, if any, responds: a fault breaks the process's CUDA context."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def left_out(reason: str = "no time was left") -> dict[str, str]:
    """Return the figures of what nobody has tried."""
    return {"status": "left out", "reason": reason}


class Supervisor:
    """Sees to it that each piece of work gets figures, or the reason why it has none.

    Args:
        command: starts the process.
        keys: what to do, in this order; None: all that the process finds.
        deadline: by time.time(); nothing begins after it.
        ended: called with the key and the figures of each piece.
        silence: seconds without a message after which the process is considered hung.
        grace: seconds after the deadline at which the process is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        keys: Sequence[str] | None,
        deadline: float,
        ended: Callable[[str, dict[str, Any]], None],
        *,
        silence: float = 150.0,
        grace: float = 15.0,
    ) -> None:
        self._command, self._deadline, self._ended = command, deadline, ended
        self._left = None if keys is None else list(keys)
        self._silence, self._grace = silence, grace
        self._running: str | None = None

    def run(self) -> None:
        """Return when all is done, given up, or left out since the deadline has passed."""
        fruitless, reason = 0, ""
        while self._left != [] and fruitless < _GIVE_UP_AFTER:
            if time.time() > self._deadline:
                self._end_all(left_out())
                return
            before = self._left and list(self._left)
            reason = self._process()
            fruitless = fruitless + 1 if self._left == before else 0
        self._end_all({"status": "failed", "reason": reason})

    def _end_all(self, figures: dict[str, Any]) -> None:
        for key in [" ".join(self._command)] if self._left is None else list(self._left):
            self._end(key, figures)

    def _end(self, key: str, figures: dict[str, Any]) -> None:
        if self._left and key in self._left:
            self._left.remove(key)
        self._ended(key, figures)

    def _process(self) -> str:
        """Let one process work until it ends; return how it ended."""
        lines: queue.Queue[str | None] = queue.Queue()
        request = {"keys": self._left, "deadline": self._deadline}
        self._running, late = None, False
        with (
            tempfile.TemporaryFile("w+") as log,
            _started(self._command, request, subprocess.PIPE, log) as process,
        ):
            threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
            try:
                while True:
                    until = self._deadline + self._grace - time.time()
                    line = lines.get(timeout=max(min(self._silence, until), 0.01))
                    if line is None:
                        break
                    if line.startswith(_MARK):
                        self._take(json.loads(line.removeprefix(_MARK)))
                process.wait()
                reason = f"its process ended with code {process.returncode}{_last_line(log)}"
            except queue.Empty:
                late = time.time() > self._deadline + self._grace
                reason = "it did not end in time" if late else f"no word for {self._silence:.0f} s"
        if self._running is not None:
            failed = {"status": "failed", "reason": reason}
            self._end(self._running, left_out(reason) if late else failed)
        return reason

    def _take(self, message: dict[str, Any]) -> None:
        if "keys" in message:
            self._left = message["keys"]
        elif "begins" in message:
            self._running = message["begins"]
        else:
            self._running = None
            self._end(message.pop("ends"), message)


@contextmanager
def meanwhile(
    work: Iterable[tuple[Sequence[str], Sequence[str]]], deadline: float
) -> Iterator[None]:
    """Inside the block, have commands do work in the background; wait for them at the end.

    Args:
        work: commands, and the keys that each is to do; what they answer is ignored.
        deadline: by time.time(); processes still running then are killed.
    """
    null = subprocess.DEVNULL
    processes = [
        _start(command, {"keys": keys, "deadline": deadline}, null, null) for command, keys in work
    ]
    try:
        yield
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.time(), 0))
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _started(*arguments: Any) -> Iterator[subprocess.Popen[str]]:
    with _start(*arguments) as process:
        try:
            yield process
        finally:
            process.kill()


def _start(
    command: Sequence[str], request: dict[str, Any], stdout: int, stderr: int | IO[str]
) -> subprocess.Popen[str]:
    # transformers must not look for kernels on the hub; torch.compile would start a process pool
    # for the one or two kernels of a case.
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, text=True, env=environment
    )
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin:  # it has ended, which its output shows too
        json.dump(request, process.stdin)
    return process


def _read(stdout: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stdout:
        lines.put(line)
    lines.put(None)


def _last_line(log: IO[str]) -> str:
    log.seek(0)
    lines = [line for line in log.read().splitlines() if line.strip()]
    return f": {lines[-1][:200]}" if lines else ""
