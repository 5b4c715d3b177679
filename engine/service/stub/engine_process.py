"""EngineProcess: one start of the engine process, with the stub's end of its channel."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator

from engine.config.engine_config import EngineConfig
from engine.errors import ConfigError, EngineDeadError, TridentError
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.child_process import ChildProcess, Death
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
                    process = subprocess.Popen(
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
        self._process = ChildProcess(process)
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
        stopped = self._process.is_stopped
        self._hung = Death(f"{why}, stopped from outside" if stopped else why, not stopped)
        self._process.kill()
        self._channel.shutdown()

    def end(self) -> Death:
        """Make sure that the process has ended; return how."""
        self._channel.shutdown()
        death = self._process.end()
        if death is None:
            return Death("cannot be killed", is_own_fault=True)
        self._channel.close()
        return self._hung or self._failed or death

    def shut_down(self) -> None:
        """Ask the process to end, and see that it does."""
        self.send(Shutdown())
        self.end()
