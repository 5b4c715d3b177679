"""EngineProcess: one start of the engine process, with the stub's end of its channel."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, TridentError
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.messages import (
    EngineFailed,
    FromEngine,
    Heartbeat,
    Ready,
    Shutdown,
    Start,
    StartFailed,
    Starting,
    ToEngine,
)
from engine.service.stub.environment import engine_environment

MODULE = "engine.service.process"
_EXIT_TIMEOUT_S = 2.0

# Signals by which a program ends through its own fault.
_CRASHES = {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL}


@dataclass(frozen=True)
class Death:
    """How a process ended.

    Attributes:
        reason: text that follows "the engine process".
        is_own_fault: it crashed, rather than was killed from outside.
    """

    reason: str
    is_own_fault: bool


class EngineProcess:
    """A child process and the channel to it.

    Create it in a thread that lives as long as the stub: Linux kills the child when the thread
    that started it ends.
    """

    def __init__(self, python: str | None = None, module: str = MODULE) -> None:
        """Start the process.

        Args:
            python: the interpreter; by default the first `python3` on PATH, which is the one whose
                site-packages a Triton stub sees. (Inside a stub, `sys.executable` is no guide.)
            module: what the process runs.

        Raises:
            ConfigError: there is no such interpreter, or nothing left to start it with.
        """
        python = python or shutil.which("python3") or "python3"
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    self._process = subprocess.Popen(
                        # -P: no package of the working directory in place of ours.
                        [python, "-P", "-m", module, "--fd", str(theirs.fileno())],
                        pass_fds=[theirs.fileno()],
                        stdin=subprocess.DEVNULL,
                        env=engine_environment(os.environ),
                    )
                except OSError:
                    ours.close()
                    raise
        except OSError as error:  # no such program, or no process or file descriptor left
            raise ConfigError(f"cannot be started: {error.strerror}", param=python) from None
        self._channel: Channel[ToEngine, FromEngine] = Channel(ours, FromEngine)
        self._num_oom_kills = _num_oom_kills()
        self.num_heartbeats = 0
        self.iteration_s = 0.0  # as the last heartbeat said
        self.is_ready = False
        self._hung: Death | None = None
        self._failed: Death | None = None  # as the process has reported

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_hung(self) -> bool:
        """Whether `kill` has been called."""
        return self._hung is not None

    def start(self, config: EngineConfig, on_progress: Callable[[str], None]) -> Ready:
        """Have the process load the model; block until it is ready.

        Raises:
            TridentError: the engine could not start, for the reason in its text.
        """
        self.send(Start(config.model_dump()))
        for message in self.messages():
            match message:
                case Starting(text):
                    on_progress(text)
                case Ready():
                    self.is_ready = True
                    return message
                case StartFailed(error):
                    raise TridentError.of(error)
        raise EngineDeadError(f"the engine process {self.end().reason} before it was ready")

    def messages(self) -> Iterator[FromEngine]:
        """Yield what the process sends, heartbeats aside, until it has gone."""
        while True:
            try:
                message = self._channel.receive()
            except ChannelError:
                return  # cut off in the middle: it has gone too
            if message is None:
                return
            if isinstance(message, Heartbeat):
                self.iteration_s = message.iteration_s
                self.num_heartbeats += 1
                continue
            if isinstance(message, EngineFailed):
                self._failed = Death(f"ended: {message.reason}", message.is_own_fault)
            yield message

    def send(self, message: ToEngine) -> None:
        """Send; does nothing if the process has gone, which the reader of `messages` notices.

        Raises:
            ChannelError: the message cannot be sent at all.
        """
        try:
            self._channel.send(message)
        except OSError:
            return

    def kill(self, why: str) -> None:
        """End a process that hangs; `messages` ends at once, even if the process cannot die."""
        stopped = _is_stopped(self.pid)
        self._hung = Death(f"{why}, stopped from outside" if stopped else why, not stopped)
        self._process.kill()
        self._channel.shutdown()

    def end(self) -> Death:
        """Make sure that the process has ended; return how."""
        self._channel.shutdown()
        try:
            status = self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                status = self._process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # inside the kernel, as a lost GPU makes it
                return Death("cannot be killed", is_own_fault=True)
        self._channel.close()
        return self._hung or self._failed or self._death(status)

    def shut_down(self) -> None:
        """Ask the process to end, and see that it does."""
        self.send(Shutdown())
        self.end()

    def _death(self, status: int) -> Death:
        if status >= 0:
            return Death(f"ended with status {status}; its log says why", is_own_fault=status != 0)
        name = signal.Signals(-status).name
        if status == -signal.SIGKILL and _num_oom_kills() > self._num_oom_kills:
            return Death(f"was killed by {name} because memory ran out", is_own_fault=True)
        return Death(f"was killed by {name}", is_own_fault=-status in _CRASHES)


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _num_oom_kills() -> int:
    """Return how many processes this machine's kernel has killed to get their memory."""
    try:
        counters = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(counters[counters.index("oom_kill") + 1])
    except (OSError, ValueError):  # an old kernel, or hidden by a sandbox
        return 0
