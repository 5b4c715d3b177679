"""The life of the engine process: start, heartbeats, reader and writer thread, and the loop."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, TridentError
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.messages import (
    AddRequest,
    EngineFailed,
    FromEngine,
    Heartbeat,
    SequenceOutput,
    Start,
    StartFailed,
    Starting,
    ToEngine,
)
from engine.protocol.step_outputs import StepOutputs
from engine.service.garbage import spare_startup_objects
from engine.service.logs import configure_logging
from engine.service.process.inbox import Inbox
from engine.service.process.loop import Core, EngineLoop

log = logging.getLogger("trident.engine")

# Between two frames with outputs, for each row of the first one: a row costs the stub about 3 us in
# the process that also sends the responses, so that frames take a twentieth of its time.
_INTERVAL_PER_ROW_S = 60e-6
_MOST_INTERVAL_S = 0.06  # of 1,000 rows, whose responses are 0.3 s apart and more

EngineChannel = Channel[FromEngine, ToEngine]
_Message = FromEngine | StepOutputs | None  # None: the end


class Writer:
    """Sends without ever having the engine loop wait for the socket.

    Outputs go out in the loop's own thread if the socket takes them at once: another thread that
    was woken for them would compete with the next step, for the interpreter too. All else is sent
    by a thread, which merges outputs that were queued into one frame, in which each sequence has
    one row. Frames with outputs of many sequences keep an interval, 60 ms at most, so that fast
    steps share a frame.
    """

    def __init__(self, channel: EngineChannel) -> None:
        """Be the only one that sends on `channel`."""
        self._channel = channel
        self._next_outputs = 0.0  # time.monotonic() second
        self._changed = threading.Condition()
        self._queued: list[_Message] = []
        self._is_idle = False  # the thread, which has nothing to send
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine | StepOutputs) -> None:
        """Send or queue `message`; returns at once. Of `StepOutputs` only the rows are sent."""
        with self._changed:
            if isinstance(message, StepOutputs) and self._send_at_once(message):
                return
            self._queued.append(message)
            # Else the thread comes by itself, when the interval is over.
            if self._is_idle or not isinstance(message, StepOutputs):
                self._changed.notify()

    def close(self) -> None:
        """Wait until what is queued has been sent."""
        with self._changed:
            self._queued.append(None)
            self._changed.notify()
        self._thread.join(timeout=5)

    def _send_at_once(self, outputs: StepOutputs) -> bool:
        if self._queued or not self._is_idle or time.monotonic() < self._next_outputs:
            return False
        try:
            sent = self._channel.send_at_once(outputs.message())
        except (ChannelError, OSError):
            return False  # the thread knows what to do
        if sent:
            self._keep_interval(outputs)
        return sent

    def _run(self) -> None:
        try:
            while True:
                for merged in _merge(self._take()):
                    if merged is None:
                        return
                    self._send(merged)
        except OSError:
            return  # the stub has gone; the reader thread ends the process
        except Exception:
            log.exception("outputs could not be sent")
            os._exit(1)  # heartbeats must not hide that outputs are lost

    def _take(self) -> list[_Message]:
        """Wait until there is something to send: until outputs may be sent, if it is outputs."""
        with self._changed:
            self._is_idle = True
            self._changed.wait_for(lambda: self._queued)
            self._is_idle = False
            while all(isinstance(each, StepOutputs) for each in self._queued):
                wait_s = self._next_outputs - time.monotonic()
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            messages, self._queued = self._queued, []
            return messages

    def _keep_interval(self, outputs: StepOutputs) -> None:
        interval_s = min(_INTERVAL_PER_ROW_S * len(outputs), _MOST_INTERVAL_S)
        self._next_outputs = time.monotonic() + interval_s

    def _send(self, message: FromEngine | StepOutputs) -> None:
        """Send `message`; outputs that are too much for one frame go in several."""
        if not isinstance(message, StepOutputs):
            self._channel.send(message)
            return
        self._keep_interval(message)
        try:
            self._channel.send(message.message())
        except ChannelError:
            if len(message) < 2:
                raise
            for half in message.split():
                self._send(half)


def _merge(messages: list[_Message]) -> Iterator[_Message]:
    """Yield `messages` in order, each run of outputs as one."""
    outputs: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, StepOutputs):
            outputs.append(message)
            continue
        if outputs:
            yield StepOutputs.concatenated(outputs).joined()
            outputs = []
        yield message
    if outputs:
        yield StepOutputs.concatenated(outputs).joined()


HEARTBEAT_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1

# Makes an engine of its settings; calls the second with its progress, the third when it has failed.
CoreFactory = Callable[[EngineConfig, Callable[[str], None], Callable[[EngineFailed], None]], Core]


class HeartbeatSender:
    """Sends a heartbeat every `HEARTBEAT_INTERVAL_S`, from its own thread."""

    def __init__(self, put: Callable[[FromEngine], None]) -> None:
        self.loop: EngineLoop | None = None  # once there is one
        self._put = put
        threading.Thread(target=self._run, name="heartbeats", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._put(Heartbeat(0.0 if self.loop is None else self.loop.iteration_s))
            time.sleep(HEARTBEAT_INTERVAL_S)


def read_into(inbox: Inbox, channel: EngineChannel) -> None:
    """Move messages from `channel` to `inbox`; end the process when the stub has gone."""
    try:
        while (message := channel.receive()) is not None:
            inbox.put(message)
    except ChannelError:
        log.exception("the engine stub sent no valid message")
    # Not sys.exit: the main thread may be inside a long step, and nothing is left to be saved.
    os._exit(0)


def aborted(request: AddRequest) -> StepOutputs:
    """Log that a request was aborted before the engine took it; return its last outputs."""
    log.info("request aborted", extra={"fields": {"uid": request.uid}})
    num_sequences = request.sampling_params.get("n", 1)
    return StepOutputs.of(
        [
            SequenceOutput(request.uid, index, [], [], finish_reason="abort")
            for index in range(num_sequences)
        ]
    )


def start(make_core: CoreFactory, first: Start, writer: Writer) -> Core | None:
    """Build the engine with the settings in `first`; None, after `StartFailed`, if that fails."""
    try:
        config = EngineConfig.parse(first.config)
        configure_logging(config.log_format)
        core = make_core(config, lambda text: writer.put(Starting(text)), partial(fail, writer))
    except TridentError as error:
        writer.put(StartFailed(error.report()))
        return None
    except Exception as error:
        log.exception("start-up failed")
        text = f"the engine could not start: {type(error).__name__}: {error}"
        writer.put(StartFailed(TridentError(text).report()))
        return None
    writer.put(core.ready)
    return core


def fail(writer: Writer, failure: EngineFailed) -> None:
    """Report the failure of an engine, and end the process: its loop may be inside a step."""
    log.error("the engine failed: %s", failure.reason)
    writer.put(failure)
    writer.close()
    logging.shutdown()
    os._exit(1)


def serve(sock: socket.socket, make_core: CoreFactory) -> int:
    """Run the engine process on `sock`; return the exit status."""
    channel: EngineChannel = Channel(sock, ToEngine)
    writer = Writer(channel)
    heartbeats = HeartbeatSender(writer.put)
    inbox = Inbox(lambda request: writer.put(aborted(request)))
    threading.Thread(target=read_into, args=(inbox, channel), name="reader", daemon=True).start()
    try:
        first = inbox.get(wait=True)
        assert isinstance(first, Start)
        core = start(make_core, first, writer)
        if core is None:
            return 1
        spare_startup_objects()
        loop = EngineLoop(core, inbox, writer.put)
        heartbeats.loop = loop
        loop.run()
    except EngineDeadError as error:
        fail(writer, EngineFailed(str(error), is_own_fault=True))
    except Exception:
        log.exception("the engine failed")
        return 1
    finally:
        writer.close()
    return 0


def configure() -> None:
    """Log to the server's stderr; ignore Ctrl-C, which the server handles by ending this process.

    The kernel also kills it with the stub: the reader thread cannot while the process is stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
