"""Sandbox: tries grammars in a child process, with bounds on time and memory."""

from __future__ import annotations

import contextlib
import json
import select
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
_POLL_S = 0.05


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

    def text_of(self, spec: GrammarSpec) -> str:
        """Return the text that llguidance compiles for `spec`, after a trial.

        Raises:
            GrammarTextError: the grammar is wrong, or takes too much time or memory.
            TridentError: the child cannot be started.
        """
        child = self._child = self._child or self._start()
        try:
            reply = _exchange(child, spec.model_dump_json().encode())
        except (OSError, EOFError) as error:
            self.close()
            limit = (
                f"{_MAX_CPU_S:g} s" if isinstance(error, TimeoutError) else "1 GiB, or the stack"
            )
            raise GrammarTextError(
                f"is too complex: compiling it takes more than {limit}"
            ) from None
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
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._end = weakref.finalize(self, _kill, child)
        try:
            _send(child, json.dumps(asdict(self._vocabulary)).encode())
            _await(child, _MAX_START_S, _MAX_START_S)
            if _output(child).readline() != b"ready\n":
                raise EOFError
        except (OSError, EOFError):
            self.close()
            raise TridentError("the process that tries grammars cannot be started") from None
        return child


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(OSError):  # of what it has not read
        child.communicate()


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
    """Raises TimeoutError, EOFError or OSError."""
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
        if time.monotonic() - began > max_wall_s or _cpu_s(child) - cpu_began > max_cpu_s:
            raise TimeoutError


def _output(child: subprocess.Popen[bytes]) -> IO[bytes]:
    assert child.stdout is not None
    return child.stdout


def _cpu_s(child: subprocess.Popen[bytes]) -> float:
    with contextlib.suppress(psutil.Error):
        times = psutil.Process(child.pid).cpu_times()
        return float(times.user + times.system)
    return 0.0
