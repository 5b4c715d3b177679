"""EngineClient: the supervised engine process as the engine stub sees it."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from msgspec import structs

from engine.config import EngineConfig
from engine.errors import EngineDeadError, RequestCancelledError, RequestError, TridentError
from engine.protocol import (
    Abort,
    FromEngine,
    Outputs,
    Ready,
    RequestFailed,
    SequenceOutput,
    Shutdown,
    Stats,
)
from engine.service.channel import ChannelError
from engine.service.stub.admission import Admission
from engine.service.stub.backoff import Backoff
from engine.service.stub.delivery import NewRequest, RequestStream, ResponseSink
from engine.service.stub.engine_process import MODULE, EngineProcess, error_of
from engine.service.stub.health import Health, State
from engine.service.stub.observer import Observer
from engine.service.stub.senders import Senders
from engine.service.stub.suspects import Suspects
from engine.service.stub.watchdog import Watchdog

log = logging.getLogger("trident.client")

_CLOSE_TIMEOUT_S = 3.0


class EngineClient:
    """Keeps an engine process running, brings requests to it and its outputs to their sinks.

    When the process dies or hangs, each request in flight gets an `EngineDeadError` at once, and so
    does each new one until another process, which is started in the background, is ready.
    Safe for use by any number of threads.
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
            on_progress: hears what the engine is doing until then, and what it is when ready.
            python: see `EngineProcess`.
            module: what the process runs.

        Raises:
            TridentError: the engine could not start; the text says why.
        """
        self._config = config
        self._observer = observer
        self._on_progress = on_progress
        self._senders = Senders(self._on_lost)
        self._suspects = Suspects()
        self._backoff = Backoff()
        self._uids = itertools.count(1)
        self._send_lock = threading.Lock()  # what follows a request must not overtake it
        self._lock = threading.Lock()  # of the five below
        self._health = Health("starting")
        self._process: EngineProcess | None = None
        self._ready: Ready | None = None
        self._streams: dict[int, RequestStream] = {}
        self._start_error: TridentError | None = None
        self._started = threading.Event()
        self._closing = threading.Event()
        # This one thread starts every process: Linux kills a child when its thread has ended.
        self._supervisor = threading.Thread(
            target=self._supervise, args=(python, module), name="supervisor", daemon=True
        )
        self._supervisor.start()
        self._watchdog = Watchdog(config, lambda: self._process)
        self._started.wait()
        if self._start_error is not None:
            self.close()
            raise self._start_error

    @property
    def ready(self) -> Ready:
        """What the engine said of itself when it was last ready."""
        assert self._ready is not None
        return self._ready

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        assert self._process is not None
        return self._process.pid

    @property
    def health(self) -> Health:
        """How things stand now."""
        with self._lock:
            return structs.replace(self._health, num_in_flight=len(self._streams))

    def check_ready(self) -> None:
        """Raise `EngineDeadError` unless the engine takes requests."""
        health = self._health  # another thread may replace it between two looks
        if health.state == "restarting":
            raise EngineDeadError(
                f"{health.detail}; another one is being started, try again in a few seconds"
            )
        if health.state != "ready":
            raise EngineDeadError(health.detail)

    def submit(self, request: NewRequest, make_sink: Callable[[int], ResponseSink]) -> int:
        """Hand `request` to the engine and return its uid.

        All answers, errors too, go to the sink that `make_sink` makes for that uid.

        Raises:
            EngineDeadError: there is no engine now.
            QueueFullError: too many requests are unfinished.
            SuspectRequestError: the engine died of this request before.
        """
        self._suspects.check(request)
        with self._send_lock:  # uids reach the engine in order
            with self._lock:
                self.check_ready()
                self._admission.enter(request)
                uid = next(self._uids)
                process = self._process
                stream = self._streams[uid] = RequestStream(uid, request, make_sink(uid))
            assert process is not None
            try:
                process.send(request.message(uid))
            except ChannelError as error:
                if self._pop(uid) is not None:
                    self._fail(stream, RequestError(f"the request is too large: {error}"))
        return uid

    def abort(self, uid: int) -> None:
        """Stop a request and free what it holds; its sink gets a `RequestCancelledError`.

        Unknown and finished uids are ignored.
        """
        stream = self._pop(uid)
        if stream is not None:
            self._send_abort(uid)
            self._fail(stream, RequestCancelledError("the request was cancelled"))

    def stop(self, request_id: str) -> int:
        """End the requests of that id early; return how many there were.

        Each is answered with what it has, and the finish reason "abort".
        """
        with self._lock:
            streams = list(self._streams.values())
        uids = [stream.uid for stream in streams if stream.request.request_id == request_id]
        for uid in uids:
            self._send_abort(uid)
        return len(uids)

    def close(self) -> None:
        """End the process; what is in flight gets an error. Repeatable."""
        self._closing.set()
        self._watchdog.close()
        if (process := self._process) is not None:
            # One that hangs may not even take the message, and one that loads does not hear it.
            patience_s = _CLOSE_TIMEOUT_S if process.is_ready else 0.0
            kill = threading.Timer(patience_s, process.kill, ["did not end when it was told to"])
            kill.start()
            if process.is_ready:
                process.send(Shutdown())
            self._supervisor.join()
            kill.cancel()
        self._supervisor.join()
        self._senders.close()

    def _supervise(self, python: str | None, module: str) -> None:
        """Start the process, serve, and begin again when it has died, until `close`."""
        while not self._closing.is_set():
            try:
                self._serve(*self._start(python, module))
            except TridentError as error:
                if not self._started.is_set():
                    self._start_error = error
                    break
                self._set_health("restarting", "the engine process could not be started again")
                if not self._closing.is_set():  # clients need not know our paths: for the log
                    log.error("the engine process could not be started: %s", error)
            if not self._closing.is_set():
                delay = self._backoff.next_delay()
                log.warning("%s; starting it again in %g s", self._health.detail, delay)
                self._closing.wait(delay)
        self._set_health("closed", "the engine process has been shut down")
        self._started.set()

    def _start(self, python: str | None, module: str) -> tuple[EngineProcess, Ready]:
        process = self._process = EngineProcess(python, module)
        if self._closing.is_set():  # `close` may have seen only the process before this one
            process.kill("is not needed any more")
        try:
            return process, process.start(self._config, self._on_progress)
        except TridentError:
            process.end()
            raise

    def _serve(self, process: EngineProcess, ready: Ready) -> None:
        """Dispatch what one process sends until it has gone; fail what it leaves."""
        is_restart = self._started.is_set()
        with self._lock:
            self._ready = ready
            self._admission = Admission(self._config, ready)
            restarts = self._health.num_restarts + is_restart
            self._health = Health("ready", num_restarts=restarts)
        self._observer.engine_up(True)
        if is_restart:
            self._observer.engine_restarted()
        self._on_progress(ready.description)
        self._started.set()
        try:
            for message in process.messages():
                self._dispatch(message)
        except Exception:  # a fault of ours: without this thread, nobody would ever be answered
            log.exception("what the engine process sent could not be handled; ending it")
        lost = self._lose_all()
        death = process.end()
        if not self._closing.is_set():
            self._set_health("restarting", f"the engine process {death.reason}")
            if lost:
                log.error("%d requests were lost", len(lost))
        if death.is_own_fault:
            self._suspects.blame(stream.request for stream in lost)

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._take(output)
            case RequestFailed(uid, code, text):
                if (failed := self._pop(uid)) is not None:
                    self._fail(failed, error_of(code, text))
            case Stats():
                self._observer.update(message)

    def _take(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.uid)
        if stream is None:
            return  # aborted meanwhile
        if stream.append(output):
            self._senders.put(stream)
        if stream.finished:
            self._pop(stream.uid)
            self._suspects.clear(stream.request)
            self._backoff.succeeded()

    def _lose_all(self) -> list[RequestStream]:
        """Refuse what comes from now on, and fail what is in flight; return that."""
        with self._lock:
            text = "the engine process has died"  # why is known when its end has been awaited
            self._health = structs.replace(self._health, state="restarting", detail=text)
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            self._fail(stream, EngineDeadError("the engine process has died; the request is lost"))
        self._observer.engine_up(False)
        self._observer.requests_lost(sum(stream.num_unfinished for stream in streams))
        return streams

    def _set_health(self, state: State, detail: str) -> None:
        with self._lock:
            self._health = structs.replace(self._health, state=state, detail=detail)

    def _send_abort(self, uid: int) -> None:
        with self._send_lock:
            process = self._process
            if process is not None and process.is_ready:  # a new one has nothing to abort
                process.send(Abort(uid))

    def _fail(self, stream: RequestStream, error: TridentError) -> None:
        stream.fail(error)
        self._senders.put(stream)

    def _pop(self, uid: int) -> RequestStream | None:
        with self._lock:
            stream = self._streams.pop(uid, None)
            if stream is not None:
                self._admission.leave(stream.request)
            return stream

    def _on_lost(self, stream: RequestStream) -> None:
        """Nobody can be answered any more: free what the request holds."""
        if self._pop(stream.uid) is not None:
            self._send_abort(stream.uid)
