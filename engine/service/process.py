"""The engine process: `python -m engine.service.process --fd N`, a child of the engine stub.

It owns the model, the KV cache and the only loop that touches them. It lives as long as the other
end of socket N: when that closes, the process exits at once, even in the middle of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.config import EngineConfig
from engine.errors import RequestError, TridentError
from engine.service.channel import Channel, ChannelError
from engine.service.inbox import Inbox
from engine.service.logs import configure_logging
from engine.service.messages import (
    Abort,
    AddRequest,
    FromEngine,
    Heartbeat,
    Outputs,
    Ready,
    RequestFailed,
    SequenceOutput,
    Shutdown,
    Start,
    StartFailed,
    Starting,
    Stats,
    ToEngine,
)
from engine.service.writer import EngineChannel, Writer

log = logging.getLogger("trident.engine")

HEARTBEAT_INTERVAL_S = 0.5
STATS_INTERVAL_S = 0.5
ARRIVALS_S = 0.02  # a burst of new requests keeps those that run no longer from their next step
_PR_SET_PDEATHSIG = 1


class Core(Protocol):
    """What the loop needs of `engine.core.engine_core.EngineCore`."""

    @property
    def ready(self) -> Ready: ...
    def add_request(self, request: AddRequest) -> None: ...
    def abort(self, uid: int) -> list[SequenceOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def step(self) -> list[SequenceOutput]: ...
    def check_integrity(self) -> None: ...
    def take_stats(self) -> Stats: ...


CoreFactory = Callable[[EngineConfig, Callable[[str], None]], Core]


class EngineLoop:
    """Feeds `core` with what arrives and hands on what it produces."""

    def __init__(self, core: Core, inbox: Inbox, put: Callable[[FromEngine], None]) -> None:
        self._core = core
        self._inbox = inbox
        self._put = put
        self._next_stats = 0.0  # time.monotonic()
        self._step_began: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds since the step under way began; 0 between steps. For any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def run(self) -> None:
        """Serve until `Shutdown`. An exception of `step` or `check_integrity` leaves it."""
        while True:
            busy = self._core.has_unfinished_requests()
            for message in self._arrived(wait=not busy):
                if isinstance(message, Shutdown):
                    return
                self._handle(message)
                busy = True
            if self._core.has_unfinished_requests():
                self._step()
            idle = not self._core.has_unfinished_requests()
            if busy and idle:
                self._core.check_integrity()
                log.debug("idle")
            self._report(now=busy and idle)

    def _step(self) -> None:
        self._step_began = time.monotonic()
        if outputs := self._core.step():
            self._put(Outputs(outputs))
        self._step_began = None

    def _report(self, *, now: bool) -> None:
        """Send what there is to count, from time to time and before falling idle."""
        if now or time.monotonic() >= self._next_stats:
            self._put(self._core.take_stats())
            self._next_stats = time.monotonic() + STATS_INTERVAL_S

    def _arrived(self, *, wait: bool) -> Iterator[ToEngine]:
        """Yield what has arrived, not for long; with `wait`, at least one message."""
        message = self._inbox.get(wait=wait)
        until = time.monotonic() + ARRIVALS_S
        while message is not None:
            yield message
            message = self._inbox.get(wait=False) if time.monotonic() < until else None

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, Abort):
            log.info("request aborted", extra={"fields": {"uid": message.uid}})
            if outputs := self._core.abort(message.uid):
                self._put(Outputs(outputs))

    def _add(self, request: AddRequest) -> None:
        """Add one request; whatever is wrong with it ends this request only."""
        fields = {"uid": request.uid, "request_id": request.request_id}
        try:
            self._core.add_request(request)
        except TridentError as error:
            if not isinstance(error, RequestError):
                refused = {**fields, "error": str(error)}
                log.warning("request refused", extra={"fields": refused})
            self._put(RequestFailed(request.uid, error.code, str(error)))
        except Exception:
            log.exception("request could not be added", extra={"fields": fields})
            self._put(RequestFailed(request.uid, TridentError.code, "internal error"))


class Heart:
    """Sends a heartbeat from a thread of its own, which no step of the engine can hold up."""

    def __init__(self, put: Callable[[FromEngine], None]) -> None:
        self.loop: EngineLoop | None = None  # once there is one
        self._put = put
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._put(Heartbeat(0.0 if self.loop is None else self.loop.step_s))
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


def start(make_core: CoreFactory, first: Start, writer: Writer) -> Core | None:
    """Build the engine as `first` says; None, and `StartFailed` sent, if that fails."""
    try:
        config = EngineConfig.parse(first.config)
        configure_logging(config.log_format)
        core = make_core(config, lambda text: writer.put(Starting(text)))
    except TridentError as error:
        writer.put(StartFailed(error.code, str(error)))
        return None
    except Exception as error:
        log.exception("start-up failed")
        text = f"the engine could not start: {type(error).__name__}: {error}"
        writer.put(StartFailed(TridentError.code, text))
        return None
    writer.put(core.ready)
    return core


def serve(sock: socket.socket, make_core: CoreFactory) -> int:
    """Be the engine process on `sock`; return the exit status."""
    channel: EngineChannel = Channel(sock, ToEngine)
    writer = Writer(channel)
    heart = Heart(writer.put)
    inbox = Inbox()
    threading.Thread(target=read_into, args=(inbox, channel), name="reader", daemon=True).start()
    try:
        first = inbox.get(wait=True)
        assert isinstance(first, Start)
        core = start(make_core, first, writer)
        if core is None:
            return 1
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
    """Log to stderr, which is the server's; leave Ctrl-C to the server, which then ends us.

    The kernel ends us with the stub too, for the reader thread cannot while we are stopped.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    configure_logging()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="connected socket to the engine stub")
    arguments = parser.parse_args()
    configure()

    def make_core(config: EngineConfig, report: Callable[[str], None]) -> Core:
        # Imported here: it takes seconds (torch), and what fails in it shall reach the stub.
        from engine.core.engine_core import EngineCore

        return EngineCore(config, report)

    status = serve(socket.socket(fileno=arguments.fd), make_core)
    logging.shutdown()
    os._exit(status)  # without waiting for daemon threads or the teardown of torch


if __name__ == "__main__":
    main()
