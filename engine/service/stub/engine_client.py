"""EngineClient: the requests in flight, between Triton and the engine process."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from typing import Protocol

from msgspec import structs

from engine.config.engine_config import EngineConfig
from engine.errors import (
    EngineDeadError,
    RequestCancelledError,
    RequestError,
    TridentError,
)
from engine.protocol.channel import ChannelError
from engine.protocol.child_process import Death
from engine.protocol.messages import (
    Abort,
    EngineFailed,
    FromEngine,
    Outputs,
    Ready,
    RequestFailed,
    Stats,
)
from engine.service.stub.admission import Admission, PoisonRequestGuard
from engine.service.stub.delivery import Delivery
from engine.service.stub.engine_process import MODULE
from engine.service.stub.request_log import log_end
from engine.service.stub.stream import NewRequest, RequestStream, ResponseSink, chunks_of
from engine.service.stub.supervisor import Health, Supervisor

log = logging.getLogger("trident.client")


class Observer(Protocol):
    """Is notified of the engine's events; its methods return at once."""

    def update(self, stats: Stats) -> None:
        """Take the statistics since the last call."""

    def engine_up(self, ready: Ready) -> None:
        """The engine has become ready."""

    def engine_down(self) -> None:
        """The engine has stopped serving."""

    def engine_restarted(self) -> None:
        """Count a start of the process after the first."""

    def requests_lost(self, count: int) -> None:
        """Count sequences that ended with the process."""

    def request_refused(self, error: Exception) -> None:
        """Count a request that was answered by `error` alone."""


class EngineClient:
    """Brings requests to the engine process and its outputs to their sinks.

    A request is answered through its sink exactly once more after `submit` has returned, by its
    last outputs or by an error. When the process dies or hangs, each request in flight gets an
    `EngineDeadError` at once, and so does each new one until another process is ready.
    Thread-safe.
    """

    def __init__(
        self,
        config: EngineConfig,
        observer: Observer,
        on_progress: Callable[[str], None] = log.info,
        *,
        python: str | None = None,
        module: str = MODULE,
    ) -> None:
        """Start the process and block until its engine is ready.

        Args:
            on_progress: is called with sentences about the start, and a description when ready.
            python: see `EngineProcess`.
            module: what the process runs.

        Raises:
            TridentError: the engine could not start, for the reason in its text.
        """
        self._config = config
        self._observer = observer
        self._delivery = Delivery(self._on_answered)
        self._poison_guard = PoisonRequestGuard()
        self._uids = itertools.count(1)
        self._send_lock = threading.Lock()  # what follows a request must not overtake it
        self._lock = threading.Lock()  # of the three below, and of _admission
        self._ready: Ready | None = None
        self._streams: dict[int, RequestStream] = {}  # that the process has not ended yet
        self._by_request_id: dict[str, dict[int, RequestStream]] = {}  # of these, by uid
        self._lost: list[RequestStream] = []  # when the process died
        self._failure = ""  # what the process has reported about its end
        try:
            self._supervisor = Supervisor(config, self, on_progress, python=python, module=module)
        except TridentError:
            self._delivery.close()
            raise

    @property
    def ready(self) -> Ready:
        """The engine's last `Ready` message."""
        assert self._ready is not None
        return self._ready

    @property
    def process_id(self) -> int:
        """Process id of the engine process."""
        return self._supervisor.process_id

    @property
    def num_in_flight(self) -> int:
        """Requests that have been submitted and that the process has not ended yet."""
        return len(self._streams)

    @property
    def health(self) -> Health:
        """The current state."""
        return structs.replace(self._supervisor.health, num_in_flight=self.num_in_flight)

    def check_ready(self) -> None:
        """Raise `EngineDeadError` unless the engine takes requests."""
        self._supervisor.check_ready()

    def submit(self, request: NewRequest, make_sink: Callable[[int], ResponseSink]) -> int:
        """Hand `request` to the engine and return its uid.

        All answers, errors too, go to the sink that `make_sink` makes for that uid.

        Raises:
            EngineDeadError: there is no engine now.
            QueueFullError: too many sequences or prompt tokens are unfinished.
            SuspectRequestError: the engine died of this request before.
        """
        self._poison_guard.check(request.fingerprint)
        with self._send_lock:  # uids reach the engine in order
            stream = self._register(request, make_sink)
            try:
                self._supervisor.send(request.message(stream.uid))
            except ChannelError as error:
                self._pop(stream.uid)
                self._fail(stream, RequestError(f"the request is too large: {error}"))
            except Exception:
                log.exception("request %d could not be sent to the engine process", stream.uid)
                self._pop(stream.uid)
                self._fail(stream, TridentError("internal error"))
        return stream.uid

    def abort(self, uid: int) -> None:
        """Stop a request and free its blocks; its sink gets a `RequestCancelledError`.

        It counts in the limits of the queue until the process has reported its end. Unknown and
        finished uids are ignored.
        """
        self._end(uid, RequestCancelledError("the request was cancelled"))

    def fail(self, uid: int, error: str) -> None:
        """As `abort`, with `error` as the answer: a later stage cannot go on with the request."""
        self._end(uid, TridentError(error))

    def stop(self, request_id: str) -> int:
        """End the requests of that id early; return how many there were.

        Each is answered with what it has, and the finish reason "abort".
        """
        with self._lock:
            streams = list(self._by_request_id.get(request_id, {}).values())
        for stream in streams:
            self._send_abort(stream)
        return len(streams)

    def close(self) -> None:
        """End the process; requests in flight get an error. Repeatable."""
        self._supervisor.close()
        self._delivery.close()

    # ---- in the supervisor's thread ---------------------------------------------------------

    def on_up(self, ready: Ready, *, is_restart: bool) -> None:
        """Take requests from now on."""
        self._delivery.rate.beside_cpu_engine = ready.computes_on_cpu
        with self._lock:
            self._ready = ready
            self._admission = Admission(self._config, ready)
        self._observer.engine_up(ready)
        if is_restart:
            self._observer.engine_restarted()

    def on_message(self, message: FromEngine) -> None:
        """Hand outputs and errors to the streams that they belong to."""
        match message:
            case Outputs():
                self._take(message)
            case RequestFailed(uid, error):
                if (stream := self._pop(uid)) is not None:
                    self._fail(stream, TridentError.of(error))
            case Stats():
                self._observer.update(message)
            case EngineFailed(reason):
                self._failure = reason

    def on_down(self) -> None:
        """Fail the requests in flight."""
        with self._lock:
            self._lost, self._streams = list(self._streams.values()), {}
            self._by_request_id = {}
        why = f" ({self._failure})" if self._failure else ""
        self._failure = ""
        error = EngineDeadError(f"the engine process has died{why}; the request is lost")
        num_lost = sum(stream.num_unfinished for stream in self._lost if self._fail(stream, error))
        self._observer.engine_down()
        self._observer.requests_lost(num_lost)

    def on_death(self, death: Death) -> None:
        """Record the requests that were in flight, if they may be the cause."""
        if self._lost:
            log.error("%d requests were lost", len(self._lost))
        if death.is_own_fault:
            self._poison_guard.blame(stream.fingerprint for stream in self._lost)
        self._lost = []

    def _take(self, outputs: Outputs) -> None:
        """Give each row to its stream, and the streams to the delivery all at once."""
        due: dict[RequestStream, None] = {}
        for uid, chunk in chunks_of(outputs):
            stream = self._streams.get(uid)
            if stream is None:
                continue
            if stream.append(chunk):
                due[stream] = None
            if chunk.details.finish_reason is not None and stream.finished:
                self._pop(uid)
                if stream.error is None:
                    self._poison_guard.clear(stream.fingerprint)
                    self._supervisor.succeeded()
        self._delivery.put(due)

    # ---- in any thread ----------------------------------------------------------------------

    def _register(
        self, request: NewRequest, make_sink: Callable[[int], ResponseSink]
    ) -> RequestStream:
        """Count `request` in, under the next uid."""
        with self._lock:
            self.check_ready()
            self._admission.enter(request.load, request.priority, request.tenant)
            uid = next(self._uids)
            try:
                stream = RequestStream(uid, request, make_sink(uid))
            except BaseException:
                self._admission.leave(request.load, request.priority, request.tenant)
                raise
            self._streams[uid] = stream
            if stream.request_id:
                self._by_request_id.setdefault(stream.request_id, {})[uid] = stream
            return stream

    def _pop(self, uid: int) -> RequestStream | None:
        """Count a request out, which the process has ended or never got."""
        with self._lock:
            stream = self._streams.pop(uid, None)
            if stream is not None:
                self._admission.leave(stream.load, stream.priority, stream.tenant)
                if stream.request_id:
                    same = self._by_request_id[stream.request_id]
                    del same[uid]
                    if not same:
                        del self._by_request_id[stream.request_id]
            return stream

    def _fail(self, stream: RequestStream, error: TridentError) -> bool:
        """Answer with `error`; False if the request has ended already."""
        failed = stream.fail(error)
        if failed:
            self._delivery.put([stream])
        return failed

    def _end(self, uid: int, error: TridentError) -> None:
        """Answer with `error`, and have the process stop working on the request."""
        with self._lock:  # its sink may know it before it is registered
            stream = self._streams.get(uid)
        if stream is not None:
            self._fail(stream, error)
            self._send_abort(stream)

    def _send_abort(self, stream: RequestStream) -> None:
        with self._send_lock:
            if not stream.abort_sent:
                stream.abort_sent = True
                self._supervisor.send(Abort(stream.uid))

    def _on_answered(self, stream: RequestStream) -> None:
        """Log the end of a request; in a sender's thread."""
        log_end(stream)
        if stream.is_refused:
            assert stream.error is not None
            self._observer.request_refused(stream.error)
        if stream.uid in self._streams:  # its sink raised: the rest is not needed
            self._send_abort(stream)
