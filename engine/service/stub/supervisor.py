"""Supervisor: keeps an engine process running, and kills one that hangs (`Watchdog`)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import structs

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, TridentError
from engine.protocol.child_process import Death
from engine.protocol.messages import FromEngine, Ready, Shutdown, ToEngine
from engine.restart_delay import RestartDelay
from engine.service.stub.engine_process import EngineProcess

log = logging.getLogger("trident.client")
watchdog_log = logging.getLogger("trident.watchdog")

State = Literal["starting", "ready", "restarting", "closed"]

_CLOSE_TIMEOUT_S = 3.0
_TICK_S = 0.5
_LOADING_TIMEOUT_S = 120.0  # importing torch from a cold disk keeps every thread waiting


class Watchdog:
    """Kills the process when its heartbeats stop, or when one iteration of its loop takes too long.

    An iteration is all between two waits for messages: handling messages, a step, statistics.
    Silence is counted in ticks of this thread, so that a stub that was itself stopped, or starved
    of processor time, does not kill the process.
    """

    def __init__(
        self, config: EngineConfig, current_process: Callable[[], EngineProcess | None]
    ) -> None:
        """Watch whatever process `current_process` returns."""
        self._heartbeat_timeout_s = config.heartbeat_timeout_s
        self._step_timeout_s = config.step_timeout_s
        self._current_process = current_process
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def _run(self) -> None:
        last, silent_s = (0, 0), 0.0
        while not self._stopped.wait(_TICK_S):
            process = self._current_process()
            if process is None or process.is_hung:
                continue
            now = (process.pid, process.num_heartbeats)
            silent_s = silent_s + _TICK_S if now == last else 0.0
            last = now
            if why := self._complaint(process, silent_s):
                watchdog_log.error("engine process %d %s: killing it", process.pid, why)
                process.kill(why)

    def _complaint(self, process: EngineProcess, silent_s: float) -> str:
        timeout_s = self._heartbeat_timeout_s if process.is_ready else _LOADING_TIMEOUT_S
        if silent_s > timeout_s:
            return f"hung: it sent no heartbeat for {silent_s:g} s"
        if process.iteration_s > self._step_timeout_s:
            return f"hung in a step of {process.iteration_s:.0f} s"
        return ""


class Health(msgspec.Struct, frozen=True):
    """The answer to a health request, as JSON.

    Attributes:
        state: only `ready` takes requests; `restarting` follows the death of the engine process.
        detail: one sentence, why it is not ready; empty if it is.
        num_restarts: how often the engine process has been started again.
        num_in_flight: requests that have been submitted and that the process has not ended yet.
        tool_call_parser: the form in which the model calls tools, in vLLM's names; or `none`.
        has_reasoning: whether an answer may begin with reasoning.
        reasoning_switches: variables of the chat template that control it.
        takes_late_system: whether that has a place for system messages that follow others.
        do_sample: whether requests sample by default; else decoding is greedy.
        sampling_defaults: sampling parameters that the checkpoint gives for that.
        ranks: the device of each process that computes the model; empty if there is one.
    """

    state: State
    detail: str = ""
    num_restarts: int = 0
    num_in_flight: int = 0
    tool_call_parser: str = "none"
    has_reasoning: bool = False
    reasoning_switches: Sequence[str] = ()
    takes_late_system: bool = False
    do_sample: bool = False
    sampling_defaults: Mapping[str, float] = msgspec.field(default_factory=dict)
    ranks: Sequence[str] = ()


class Owner(Protocol):
    """Is notified of the process's events, in the supervisor's thread."""

    def on_up(self, ready: Ready, *, is_restart: bool) -> None:
        """A process has become ready for requests."""

    def on_message(self, message: FromEngine) -> None:
        """It has sent a message. An exception here ends the process."""

    def on_down(self) -> None:
        """It takes no requests any more."""

    def on_death(self, death: Death) -> None:
        """It has ended, after `on_down`."""


class Supervisor:
    """Starts the engine process, watches it, and starts it again when it has died.

    A process that finished a request is replaced at once, others after `RestartDelay`.
    Thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        owner: Owner,
        on_progress: Callable[[str], None],
        *,
        python: str | None,
        module: str,
    ) -> None:
        """Start the process and block until its engine is ready; arguments as `EngineClient`.

        Raises:
            TridentError: the engine could not start, for the reason in its text.
        """
        self._config = config
        self._owner = owner
        self._on_progress = on_progress
        self._python, self._module = python, module
        self._delay = RestartDelay()
        self._lock = threading.Lock()  # of _health
        self._health = Health("starting")
        self._process: EngineProcess | None = None
        self._start_error: TridentError | None = None
        self._started = threading.Event()
        self._closing = threading.Event()
        # This one thread starts every process: Linux kills a child when its thread has ended.
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()
        self._watchdog = Watchdog(config, lambda: self._process)
        self._started.wait()
        if self._start_error is not None:
            self.close()
            raise self._start_error

    @property
    def process_id(self) -> int:
        """Process id of the engine process."""
        assert self._process is not None
        return self._process.pid

    @property
    def health(self) -> Health:
        """The current state, without the number of requests in flight."""
        return self._health

    def check_ready(self) -> None:
        """Raise `EngineDeadError` unless the engine takes requests."""
        health = self._health  # another thread may replace it between two looks
        if health.state == "restarting":
            raise EngineDeadError(
                f"{health.detail}; a new engine process is being started, try again in a few "
                "seconds"
            )
        if health.state != "ready":
            raise EngineDeadError(health.detail)

    def send(self, message: ToEngine) -> None:
        """Send to the process, if there is one that is ready.

        Raises:
            ChannelError: the message cannot be sent at all.
        """
        process = self._process
        if process is not None and process.is_ready:  # a new one expects `Start`
            process.send(message)

    def succeeded(self) -> None:
        """Record that a request has finished, so that a dead process is replaced at once."""
        self._delay.succeeded()

    def close(self) -> None:
        """End the process, and wait until the owner has heard of it. Repeatable."""
        self._closing.set()
        self._watchdog.close()
        if (process := self._process) is not None:
            # One that hangs may not even take the message, and one that loads does not hear it.
            patience_s = _CLOSE_TIMEOUT_S if process.is_ready else 0.0
            kill = threading.Timer(patience_s, process.kill, ["did not end when it was asked to"])
            kill.start()
            if process.is_ready:
                process.send(Shutdown())
            self._thread.join()
            kill.cancel()
        self._thread.join()

    def _run(self) -> None:
        """Start the process, serve, and begin again when it has died, until `close`."""
        while not self._closing.is_set():
            try:
                self._serve(*self._start())
            except TridentError as error:
                if not self._started.is_set():
                    self._start_error = error
                    break
                if not self._closing.is_set():  # clients need not know our paths: for the log
                    log.error("the engine process could not be started: %s", error)
                self._set_health("restarting", "the engine process could not be started again")
            if not self._closing.is_set():
                delay = self._delay.next()
                log.warning("%s; starting it again in %g s", self._health.detail, delay)
                self._closing.wait(delay)
        self._set_health("closed", "the engine process has been shut down")
        self._started.set()

    def _start(self) -> tuple[EngineProcess, Ready]:
        process = self._process = EngineProcess(self._python, self._module)
        if self._closing.is_set():  # `close` may have seen only the process before this one
            process.kill("is not needed any more")
        try:
            return process, process.start(self._config, self._on_progress)
        except TridentError:
            process.end()
            raise
        except Exception as error:  # a bug of ours: without this thread, the start would never end
            process.end()
            log.exception("the engine process could not be started")
            raise EngineDeadError(f"the engine process could not be started: {error}") from None

    def _serve(self, process: EngineProcess, ready: Ready) -> None:
        """Pass on the messages of one process until it has ended."""
        is_restart = self._started.is_set()
        self._owner.on_up(ready, is_restart=is_restart)
        with self._lock:
            restarts = self._health.num_restarts + is_restart
            self._health = Health(
                "ready",
                num_restarts=restarts,
                tool_call_parser=ready.tool_call_parser,
                has_reasoning=ready.has_reasoning,
                reasoning_switches=ready.reasoning_switches,
                takes_late_system=ready.takes_late_system,
                do_sample=ready.do_sample,
                sampling_defaults=ready.sampling_defaults,
                ranks=ready.ranks,
            )
        self._on_progress(ready.description)
        self._started.set()
        try:
            for message in process.messages():
                self._owner.on_message(message)
        except Exception:  # a bug of ours: without this thread, no request would ever be answered
            log.exception("what the engine process sent could not be handled; ending it")
        # Why it died is known when its end has been awaited.
        self._set_health("restarting", "the engine process has died")
        self._owner.on_down()
        death = process.end()
        if not self._closing.is_set():
            self._set_health("restarting", f"the engine process {death.reason}")
        self._owner.on_death(death)

    def _set_health(self, state: State, detail: str) -> None:
        with self._lock:
            self._health = structs.replace(self._health, state=state, detail=detail)
