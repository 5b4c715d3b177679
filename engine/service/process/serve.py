"""The life of the engine process: start, heartbeats, reader thread, and the loop between."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.errors import TridentError
from engine.protocol.messages import (
    AddRequest,
    FromEngine,
    Heartbeat,
    SequenceOutput,
    Start,
    StartFailed,
    Starting,
    ToEngine,
)
from engine.protocol.step_outputs import StepOutputs
from engine.service.channel import Channel, ChannelError
from engine.service.garbage import spare_startup_objects
from engine.service.logs import configure_logging
from engine.service.process.inbox import Inbox
from engine.service.process.loop import Core, EngineLoop
from engine.service.process.writer import EngineChannel, Writer

log = logging.getLogger("trident.engine")

HEARTBEAT_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1

CoreFactory = Callable[[EngineConfig, Callable[[str], None]], Core]


class Heart:
    """Sends a heartbeat every `HEARTBEAT_INTERVAL_S`, from its own thread."""

    def __init__(self, put: Callable[[FromEngine], None]) -> None:
        self.loop: EngineLoop | None = None  # once there is one
        self._put = put
        threading.Thread(target=self._run, name="heart", daemon=True).start()

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
    """Build the engine as `first` says; None, and `StartFailed` sent, if that fails."""
    try:
        config = EngineConfig.parse(first.config)
        configure_logging(config.log_format)
        core = make_core(config, lambda text: writer.put(Starting(text)))
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


def serve(sock: socket.socket, make_core: CoreFactory) -> int:
    """Run the engine process on `sock`; return the exit status."""
    channel: EngineChannel = Channel(sock, ToEngine)
    writer = Writer(channel)
    heart = Heart(writer.put)
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
        heart.loop = loop
        loop.run()
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
