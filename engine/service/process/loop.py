"""EngineLoop: the only loop that touches the model and the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine.errors import RequestError, TridentError
from engine.protocol import (
    Abort,
    AddRequest,
    FromEngine,
    Outputs,
    Ready,
    RequestFailed,
    SequenceOutput,
    Shutdown,
    Stats,
    ToEngine,
)
from engine.service.process.inbox import Inbox

log = logging.getLogger("trident.engine")

STATS_INTERVAL_S = 0.5
ARRIVALS_S = 0.02  # a burst of new requests keeps those that run no longer from their next step


class Core(Protocol):
    """What the loop needs of `engine.core.engine_core.EngineCore`."""

    @property
    def ready(self) -> Ready: ...
    def add_request(self, request: AddRequest) -> None: ...
    def abort(self, uid: int) -> list[SequenceOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def step(self) -> list[SequenceOutput]: ...
    def check_idle(self) -> None: ...
    def take_stats(self) -> Stats: ...


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
        """Serve until `Shutdown`. An exception of `step` or `check_idle` leaves it."""
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
                self._core.check_idle()
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
