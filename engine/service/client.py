"""EngineClient: the engine process as the engine stub sees it."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable

from engine.config import EngineConfig
from engine.errors import (
    ConfigError,
    EngineDeadError,
    QueueFullError,
    RequestCancelledError,
    RequestError,
    TridentError,
    UnsupportedError,
)
from engine.service.channel import Channel, ChannelError
from engine.service.delivery import NewRequest, RequestStream, ResponseSink, Senders
from engine.service.environment import engine_environment
from engine.service.messages import (
    Abort,
    AddRequest,
    FromEngine,
    Outputs,
    Ready,
    RequestFailed,
    Shutdown,
    Start,
    StartFailed,
    Starting,
    ToEngine,
)

log = logging.getLogger("trident.client")

_MODULE = "engine.service.process"
_EXIT_TIMEOUT_S = 2.0

StubChannel = Channel[ToEngine, FromEngine]


class EngineClient:
    """Starts the engine process, brings requests to it and its outputs to their sinks.

    When the process dies, each request in flight gets an `EngineDeadError` at once, and so does
    each new one. Safe for use by any number of threads.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_progress: Callable[[str], None] = log.info,
        *,
        python: str | None = None,
        module: str = _MODULE,
    ) -> None:
        """Start the process and block until its engine is ready.

        Args:
            on_progress: hears what the engine is doing until then, and what it is when ready.
            python: the interpreter; by default the first `python3` on PATH, which is the one whose
                site-packages a Triton stub sees. (Inside a stub, `sys.executable` is no guide.)
            module: what the process runs.

        Raises:
            TridentError: the engine could not start; the text says why.
        """
        python = python or shutil.which("python3") or "python3"
        self._channel, self._process = _spawn(python, module)
        self._senders = Senders(self._on_lost)
        self._streams: dict[int, RequestStream] = {}
        self._lock = threading.Lock()  # of _streams and _dead
        self._dead = False
        self._submit_lock = threading.Lock()
        self._uids = itertools.count(1)
        try:
            self.ready = self._start(config, on_progress)
        except BaseException:
            self.close()
            raise
        self._receiver = threading.Thread(target=self._receive, name="receiver", daemon=True)
        self._receiver.start()

    @property
    def process_id(self) -> int:
        """Of the engine process."""
        return self._process.pid

    def submit(self, request: NewRequest, make_sink: Callable[[int], ResponseSink]) -> int:
        """Hand `request` to the engine and return its uid.

        All answers, errors too, go to the sink that `make_sink` makes for that uid.

        Raises:
            EngineDeadError: the engine process is gone.
        """
        with self._submit_lock:  # uids reach the engine in order
            uid = next(self._uids)
            with self._lock:
                if self._dead:
                    raise EngineDeadError("the engine process has died; restart the server")
                stream = self._streams[uid] = RequestStream(uid, request, make_sink(uid))
            try:
                self._send(_add_request(uid, request))
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
            self._send(Abort(uid))
            self._fail(stream, RequestCancelledError("the request was cancelled"))

    def close(self) -> None:
        """End the process; what is in flight gets an error. Repeatable."""
        self._send(Shutdown())
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._on_death()
        self._senders.close()

    def _start(self, config: EngineConfig, on_progress: Callable[[str], None]) -> Ready:
        self._send(Start(config.model_dump()))
        while True:
            match self._next_message():
                case Starting(text):
                    on_progress(text)
                case Ready() as ready:
                    on_progress(ready.description)
                    return ready
                case StartFailed(code, message):
                    raise _error(code, message)
                case _:
                    status = self._process.wait()
                    raise EngineDeadError(
                        f"the engine process ended with status {status} before it was ready; "
                        "its log says why"
                    )

    def _send(self, message: ToEngine) -> None:
        """Send, unless the process is gone: then the receiver notices and fails all requests."""
        try:
            self._channel.send(message)
        except OSError:
            log.debug("not sent, the engine process is gone")

    def _next_message(self) -> FromEngine | None:
        try:
            return self._channel.receive()
        except ChannelError:
            log.exception("the engine process sent no valid message")
            return None

    def _receive(self) -> None:
        while (message := self._next_message()) is not None:
            if isinstance(message, Outputs):
                self._dispatch(message)
            elif isinstance(message, RequestFailed) and (stream := self._pop(message.uid)):
                self._fail(stream, _error(message.code, message.message))
        # The place for a restart in the background: `_dead` then ends when the new one is ready.
        self._on_death()
        self._process.kill()  # in case that it only lost its channel
        log.info("the engine process has ended with status %d", self._process.wait())

    def _dispatch(self, message: Outputs) -> None:
        for output in message.outputs:
            stream = self._streams.get(output.uid)
            if stream is None:
                continue  # aborted meanwhile
            if stream.append(output):
                self._senders.put(stream)
            if stream.finished:
                self._pop(stream.uid)

    def _on_death(self) -> None:
        """Refuse what comes from now on, and fail what is in flight."""
        with self._lock:
            self._dead = True
            streams, self._streams = list(self._streams.values()), {}
        if streams:
            log.error("the engine process has gone with %d requests in flight", len(streams))
        for stream in streams:
            self._fail(stream, EngineDeadError("the engine process has died; the request is lost"))

    def _fail(self, stream: RequestStream, error: TridentError) -> None:
        if stream.fail(error):
            self._senders.put(stream)

    def _pop(self, uid: int) -> RequestStream | None:
        with self._lock:
            return self._streams.pop(uid, None)

    def _on_lost(self, stream: RequestStream) -> None:
        """Nobody can be answered any more: free what the request holds."""
        if self._pop(stream.uid) is not None:
            self._send(Abort(stream.uid))


def _spawn(python: str, module: str) -> tuple[StubChannel, subprocess.Popen[bytes]]:
    """Start the engine process; its stderr is ours. Raises `ConfigError` if there is no python."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            process = subprocess.Popen(
                [python, "-m", module, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=engine_environment(os.environ),
            )
        except OSError as error:
            ours.close()
            raise ConfigError(f"{python}: cannot be started: {error.strerror}") from None
    return Channel(ours, FromEngine), process


def _add_request(uid: int, request: NewRequest) -> AddRequest:
    return AddRequest(
        uid=uid,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        stream=request.stream,
        priority=request.priority,
        timeout_s=request.timeout_s,
    )


def _error(code: str, message: str) -> TridentError:
    """Return the exception for an error that the process reported."""
    for kind in (RequestError, UnsupportedError, QueueFullError):
        if kind.code == code:
            return kind(message)
    return TridentError(message)
