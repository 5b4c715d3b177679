"""GrammarCompiler: compiles grammars in threads, by tenant, and keeps the last ones."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO

import psutil
from llguidance import LLMatcher, LLTokenizer

from engine.errors import TridentError, UnsupportedError
from engine.fair_executor import FairExecutor
from engine.text.grammar.spec import GrammarSpec, GrammarTextError
from engine.text.grammar.trial import described, limits_of
from engine.text.grammar.vocabulary import TextEnds, Vocabulary

_MAX_KEPT = 64
_NICENESS = 10  # of the threads, and of the processes that they start
# Of a JSON schema or a list of choices, which take 1 s of a processor for a million characters.
_MAX_SMALL_CHARACTERS = 2**14
_LARGE_COST = 2**18  # at least, of what may take long whatever its size

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
        except (OSError, EOFError, ValueError) as error:  # a ValueError: closed, or cut off
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
        except (OSError, EOFError, ValueError):  # a ValueError: closed meanwhile
            self.close()
            raise TridentError("the process that compiles grammars cannot be started") from None
        return child


def _fault(child: subprocess.Popen[bytes], error: Exception) -> Exception:
    """Return what to raise for a trial that ended with `error` instead of a reply."""
    if isinstance(error, _NoProcessorError):
        return TridentError(
            f"the grammar could not be compiled within {_MAX_WALL_S:g} s; try again"
        )
    if isinstance(error, TimeoutError):
        limit = f"{_MAX_CPU_S:g} s"
    else:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_MAX_END_S)
        # Its own limits end it by other signals: this is the system's, which lacks memory.
        if child.returncode == -signal.SIGKILL:
            return TridentError("the process that compiles grammars was killed; try again")
        limit = "1 GiB, or the stack"
    return GrammarTextError(f"is too complex: compiling it takes more than {limit}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with contextlib.suppress(OSError):  # of what it has not read
        child.communicate()


def _exchange(child: subprocess.Popen[bytes], line: bytes) -> dict[str, str]:
    """Raises TimeoutError, EOFError, another OSError, or ValueError."""
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


@dataclass(eq=False, slots=True)
class _Compilation:
    """A grammar that has been asked for, and the tenants on whose behalf it waits."""

    future: Future[LLMatcher] = field(default_factory=Future)
    tenants: set[str] = field(default_factory=set)


class GrammarCompiler:
    """Compiles grammars one by one, tenants in turn, each first in the sandbox, then for use.

    Small ones are compiled beside one that may take long, in a second thread with a sandbox of its
    own. Neither threads nor processes are started before the first grammar, or the first that may
    take long.

    Attributes:
        text_ends: of the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Compile for `vocabulary`; this holds the interpreter for up to a second."""
        self._tokenizer: LLTokenizer | UnsupportedError
        try:
            self._tokenizer = vocabulary.ll_tokenizer()
        except UnsupportedError as error:  # of the requests, not of the engine
            self._tokenizer = error
        self.text_ends: TextEnds | None = None
        if isinstance(self._tokenizer, LLTokenizer):
            self.text_ends = vocabulary.text_ends(self._tokenizer)
        self._vocabulary = vocabulary
        self._sandboxes: dict[int, Sandbox] = {}  # by thread
        self._executor = FairExecutor(
            "grammar", max_small_cost=_MAX_SMALL_CHARACTERS, initializer=self._begin
        )
        self._lock = threading.Lock()  # of the compilations that begin
        self._kept: OrderedDict[tuple[str | bool | None, ...], _Compilation] = OrderedDict()

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[LLMatcher]:
        """Return the matcher at its start, to be copied for each sequence; equal specs share it.

        The future raises `GrammarTextError` if the grammar cannot be used, `UnsupportedError` if
        none can with this tokenizer, and another error if it could not be tried: the next request
        tries it again. What waits on behalf of several tenants has the turn of the first.
        """
        kept = self._kept.get(spec.key)
        if kept is None or not _may_be_kept(kept.future):
            kept = self._kept[spec.key] = _Compilation()
        self._kept.move_to_end(spec.key)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        future = kept.future
        if tenant not in kept.tenants and not (future.running() or future.done()):
            kept.tenants.add(tenant)
            self._executor.submit(
                partial(self._run, spec, future), cost=cost_of(spec), tenant=tenant
            )
        return future

    def close(self) -> None:
        """End the threads and the child processes."""
        for kept in self._kept.values():
            kept.future.cancel()
        self._executor.close()
        for sandbox in self._sandboxes.values():
            sandbox.close()

    def _run(self, spec: GrammarSpec, future: Future[LLMatcher]) -> None:
        """Compile `spec`, unless that has been done in the turn of another tenant."""
        with self._lock:
            if future.running() or future.done() or not future.set_running_or_notify_cancel():
                return
        try:
            matcher = self._compile(spec)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(matcher)

    def _begin(self) -> None:
        """Begin a thread: with a lower priority, and a sandbox that is ready for its first task."""
        # Not that of the thread which starts this one.
        niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + _NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(niceness, 19))
        sandbox = self._sandboxes[threading.get_ident()] = Sandbox(self._vocabulary)
        if not isinstance(self._tokenizer, UnsupportedError):
            with contextlib.suppress(TridentError):  # the first task tries again, and reports it
                sandbox.start()

    def _compile(self, spec: GrammarSpec) -> LLMatcher:
        if isinstance(self._tokenizer, UnsupportedError):
            raise self._tokenizer
        text = self._sandboxes[threading.get_ident()].text_of(spec)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits_of(spec))
        matcher.compute_bitmask()  # the first one of a lexer takes longest
        if matcher.is_error():
            raise GrammarTextError(described(matcher.get_error()))
        return matcher


def cost_of(spec: GrammarSpec) -> int:
    """Return how much of its tenant's turn a grammar takes, in characters of a plain JSON schema.

    Regular expressions, patterns in a schema too, and grammars may take all the time that there is
    for a trial, however short they are.
    """
    size = len(spec.text)
    is_plain = spec.kind in ("json_schema", "choice") and '"pattern' not in spec.text
    if is_plain and size <= _MAX_SMALL_CHARACTERS:
        return max(1, size)
    return size if is_plain else size + _LARGE_COST


def _may_be_kept(future: Future[LLMatcher]) -> bool:
    """Whether another compilation would end as this one does, or will."""
    if future.cancelled():
        return False
    error = future.exception() if future.done() else None
    return error is None or isinstance(error, GrammarTextError | UnsupportedError)
