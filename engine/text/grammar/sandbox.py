"""Sandbox: tries grammars in a child process, with bounds on time and memory."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import asdict
from typing import IO

import psutil

from engine.errors import TridentError
from engine.text.grammar.spec import GrammarSpec, GrammarTextError
from engine.text.grammar.vocabulary import Vocabulary

_MAX_CPU_S = 2.0  # of one grammar
_MAX_WALL_S = 20.0  # of one grammar, if others take the processor
_MAX_START_S = 60.0
_MAX_END_S = 5.0  # after its output has ended
_POLL_S = 0.05


class _NoProcessorError(TimeoutError):
    """The time is over, and others had the processor."""


class Sandbox:
    """One child process, started when it is needed and again after a grammar has ended it.

    To be used by one thread: the child ends with it, and with this object.
    """

    def __init__(self, vocabulary: Vocabulary, module: str = "engine.text.grammar.trial") -> None:
        """Try grammars over `vocabulary`; `module` is what the child runs."""
        self._vocabulary = vocabulary
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., Sandbox] | None = None

    def start(self) -> None:
        """Start the child, unless it runs; raises `TridentError` if it cannot be started."""
        self._child = self._child or self._start()

    def text_of(self, spec: GrammarSpec) -> str:
        """Return the text that llguidance compiles for `spec`, after a trial.

        Raises:
            GrammarTextError: the grammar is wrong, or takes too much time or memory.
            TridentError: it could not be tried, which is not the grammar's fault.
        """
        if self._child is not None and self._child.poll() is not None:  # somebody killed it
            self.close()
        self.start()
        child = self._child
        assert child is not None
        try:
            reply = _exchange(child, spec.model_dump_json().encode())
        except (OSError, EOFError) as error:
            fault = _fault(child, error)
            self.close()
            raise fault from None
        if "error" in reply:
            raise GrammarTextError(reply["error"])
        return reply["text"]

    def close(self) -> None:
        """End the child; another call of `text_of` starts a new one."""
        if self._end is not None:
            self._end()
        self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        # -P: no package of the working directory in place of ours.
        command = [sys.executable, "-P", "-m", self._module]
        try:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._end = weakref.finalize(self, _kill, child)
            _send(child, json.dumps(asdict(self._vocabulary)).encode())
            _await(child, _MAX_START_S, _MAX_START_S)
            if _output(child).readline() != b"ready\n":
                raise EOFError
        except (OSError, EOFError):
            self.close()
            raise TridentError("the process that tries grammars cannot be started") from None
        return child


def _fault(child: subprocess.Popen[bytes], error: Exception) -> Exception:
    """Return what to raise for a trial that ended with `error` instead of a reply."""
    if isinstance(error, _NoProcessorError):
        return TridentError(f"the grammar could not be tried within {_MAX_WALL_S:g} s; try again")
    if isinstance(error, TimeoutError):
        limit = f"{_MAX_CPU_S:g} s"
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_MAX_END_S)
        # Its own limits end it by other signals: this is the system's, which lacks memory.
        if child.returncode == -signal.SIGKILL:
            return TridentError("the process that tries grammars was killed; try again")
        limit = "1 GiB, or the stack"
    return GrammarTextError(f"is too complex: compiling it takes more than {limit}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(OSError):  # of what it has not read
        child.communicate()


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
    """Raises TimeoutError, EOFError or another OSError."""
    _send(child, line)
    _await(child, _MAX_CPU_S, _MAX_WALL_S)
    answer = _output(child).readline()
    if not answer:
        raise EOFError
    reply: dict[str, str] = json.loads(answer)
    return reply


def _send(child: subprocess.Popen[bytes], line: bytes) -> None:
    assert child.stdin is not None
    child.stdin.write(line + b"\n")
    child.stdin.flush()


def _await(child: subprocess.Popen[bytes], max_cpu_s: float, max_wall_s: float) -> None:
    """Wait until the child writes or ends; raises TimeoutError."""
    began, cpu_began = time.monotonic(), _cpu_s(child)
    while not select.select([_output(child)], [], [], _POLL_S)[0]:
        if _cpu_s(child) - cpu_began > max_cpu_s:
            raise TimeoutError
        if time.monotonic() - began > max_wall_s:
            raise _NoProcessorError


def _output(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdout is not None
    return child.stdout


def _cpu_s(child: subprocess.Popen[bytes]) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(child.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
