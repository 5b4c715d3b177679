"""EngineLoop: the only loop that touches the model and the KV cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from engine.errors import RequestError, TridentError
from engine.protocol.messages import (
    Abort,
    AddRequest,
    FromEngine,
    Ready,
    RequestFailed,
    Shutdown,
    Stats,
    ToEngine,
)
from engine.protocol.step_outputs import StepOutputs
from engine.service.process.inbox import Inbox

log = logging.getLogger("trident.engine")

STATS_INTERVAL_S = 0.5
MAX_ARRIVALS_S = 0.02


class Core(Protocol):
    """The methods of `engine.core.engine_core.EngineCore` that the loop calls."""

    @property
    def ready(self) -> Ready: ...
    def add_request(self, request: AddRequest) -> Sequence[RequestFailed]: ...
    def abort(self, uid: int) -> StepOutputs: ...
    def has_unfinished_requests(self) -> bool: ...
    def step(self) -> StepOutputs: ...
    def check_idle(self) -> None: ...
    def take_stats(self) -> Stats: ...


class EngineLoop:
    """Passes arriving messages to `core`, runs its steps, and sends its outputs.

    Each iteration takes what has arrived and then makes one step. While requests run, a burst of
    arrivals delays their next step by no longer than the last step took; the rest of the burst
    follows after the next step. At least one message is taken before each step.
    """

    def __init__(
        self,
        core: Core,
        inbox: Inbox,
        put: Callable[[FromEngine | StepOutputs], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Serve `core`; `put` queues a message to the stub, and must return at once."""
        self._core = core
        self._inbox = inbox
        self._put = put
        self._clock = clock
        self._next_stats = 0.0
        self._last_step_s = 0.0
        self._iteration_began: float | None = None  # None: it waits for messages

    @property
    def iteration_s(self) -> float:
        """Seconds that the iteration under way has taken; 0 while it waits. For any thread."""
        began = self._iteration_began
        return 0.0 if began is None else self._clock() - began

    def run(self) -> None:
        """Serve until `Shutdown`. An exception of `step` or `check_idle` leaves it."""
        while True:
            self._iteration_began = self._clock()
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
        began = self._clock()
        self._send(self._core.step())
        self._last_step_s = self._clock() - began

    def _report(self, *, now: bool) -> None:
        """Send the statistics: every `STATS_INTERVAL_S`, and before the loop falls idle."""
        if now or self._clock() >= self._next_stats:
            self._put(self._core.take_stats())
            self._next_stats = self._clock() + STATS_INTERVAL_S

    def _arrived(self, *, wait: bool) -> Iterator[ToEngine]:
        """Yield the messages to handle before the next step; with `wait`, at least one."""
        message = self._wait() if wait else self._inbox.get(wait=False)
        allowed_s = MAX_ARRIVALS_S if wait else min(self._last_step_s, MAX_ARRIVALS_S)
        until = self._clock() + allowed_s
        while message is not None:
            yield message
            message = self._inbox.get(wait=False) if self._clock() < until else None

    def _wait(self) -> ToEngine | None:
        self._iteration_began = None
        message = self._inbox.get(wait=True)
        self._iteration_began = self._clock()
        return message

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, AddRequest):
            self._add(message)
        elif isinstance(message, Abort):
            log.info("request aborted", extra={"fields": {"uid": message.uid}})
            self._send(self._core.abort(message.uid))

    def _send(self, outputs: StepOutputs) -> None:
        """Send outputs and failures; a failure is the last of its request."""
        if len(outputs):
            self._put(outputs)
        for failure in outputs.failures:
            self._put(failure)

    def _add(self, request: AddRequest) -> None:
        """Add one request; an error in it ends this request only."""
        fields = {"uid": request.uid, "request_id": request.request_id}
        try:
            displaced = self._core.add_request(request)
        except TridentError as error:
            if not isinstance(error, RequestError):
                refused = {**fields, "error": str(error)}
                log.warning("request refused", extra={"fields": refused})
            self._put(RequestFailed(request.uid, error.report()))
        except Exception:
            log.exception("request could not be added", extra={"fields": fields})
            self._put(RequestFailed(request.uid, TridentError("internal error").report()))
        else:
            for failure in displaced:
                self._put(failure)
