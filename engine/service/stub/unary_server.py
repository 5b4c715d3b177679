"""UnaryServer: takes the requests of the stage that answers plain `infer()`, over a socket."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable

from engine.errors import RequestCancelledError, TridentError
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.messages import Chunk, OutputDetails
from engine.service.stub.engine_client import EngineClient
from engine.service.stub.engine_inputs import check_stop_id, parse_engine_inputs
from engine.service.stub.request_log import log_refusal
from engine.service.unary_link import (
    FromEngineStub,
    ToEngineStub,
    UnaryAnswer,
    UnaryCancel,
    UnaryFailed,
    UnaryRequest,
    UnaryStop,
    accepted,
    listener,
)

log = logging.getLogger("trident.unary")

_TOO_LARGE = "the answer is too large; ask for fewer outputs or log-probabilities"
_RETRY_S = 0.1  # while the stub that this one replaces still listens

StageChannel = Channel[FromEngineStub, ToEngineStub]


class UnaryServer:
    """Submits the requests that arrive on the socket, and answers each with one message.

    Its requests count in the limits, the metrics and the log as all others do.
    """

    def __init__(
        self,
        client: EngineClient,
        for_client: Callable[[Exception], TridentError],
        on_refusal: Callable[[Exception], None],
    ) -> None:
        """Listen, in a thread.

        Args:
            client: takes the requests.
            for_client: returns what a client may see of an error.
            on_refusal: is called with the error of each request that never reached the engine.
        """
        self._client = client
        self._for_client = for_client
        self._on_refusal = on_refusal
        self._closed = threading.Event()
        self._lock = threading.Lock()  # of the next two
        self._listening: socket.socket | None = None
        self._peers: set[_Peer] = set()
        self._thread = threading.Thread(target=self._listen, name="unary-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close the connections; requests in flight are aborted."""
        self._closed.set()
        with self._lock:
            if self._listening is not None:
                self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
            peers = list(self._peers)
        for peer in peers:
            peer.close()
        self._thread.join(timeout=5)

    def submit(self, message: UnaryRequest | UnaryStop, peer: _Peer) -> None:
        """Submit a request of `peer`, which hears of the answer or of what is wrong."""
        try:
            if isinstance(message, UnaryStop):
                self._stop(message, peer)
            else:
                self._generate(message, peer)
        except Exception as error:
            log_refusal(message.request_id, error)
            if not isinstance(error, RequestCancelledError):
                self._on_refusal(error)
            peer.put(UnaryFailed(message.number, self._for_client(error).report()))

    def abort(self, uid: int) -> None:
        """Stop a request of a peer."""
        self._client.abort(uid)

    def _generate(self, message: UnaryRequest, peer: _Peer) -> None:
        self._client.check_ready()
        ready = self._client.ready
        inputs = parse_engine_inputs(message.tensors(), {}, 0, ready, request_id=message.request_id)

        def make_sink(uid: int) -> _UnarySink:
            peer.begin(message.number, uid)
            return _UnarySink(message.number, peer, ready.block_size)

        try:
            self._client.submit(inputs.request, make_sink)
        except Exception:
            peer.end(message.number)
            raise

    def _stop(self, message: UnaryStop, peer: _Peer) -> None:
        check_stop_id(message.request_id)
        self._client.stop(message.request_id)
        nothing = Chunk(0, b"", b"", OutputDetails(finish_reason="abort"))
        peer.put(UnaryAnswer(message.number, [nothing], self._client.ready.block_size))

    def _listen(self) -> None:
        listening = self._bound()
        if listening is None:
            return
        with listening:
            for channel in accepted(listening):
                peer = _Peer(channel, self)
                with self._lock:
                    self._peers.add(peer)
                threading.Thread(
                    target=self._serve, args=(peer,), name="unary-reader", daemon=True
                ).start()

    def _bound(self) -> socket.socket | None:
        """Return the listening socket; None if this end is closed first."""
        while not self._closed.is_set():
            with contextlib.suppress(OSError):
                listening = listener()
                with self._lock:
                    self._listening = listening
                if self._closed.is_set():
                    listening.shutdown(socket.SHUT_RDWR)
                return listening
            self._closed.wait(_RETRY_S)
        return None

    def _serve(self, peer: _Peer) -> None:
        try:
            peer.read()
        except Exception:
            log.exception("a stage's requests cannot be read any more")
        finally:
            with self._lock:
                self._peers.discard(peer)
            peer.release()


class _Peer:
    """One connected stage: its requests in flight, and the messages that are due to it."""

    def __init__(self, channel: StageChannel, server: UnaryServer) -> None:
        self._channel = channel
        self._server = server
        self._lock = threading.Lock()
        self._uids: dict[int, int] = {}  # of the requests in flight, by the stage's number
        # The threads that send responses must never wait for this stage.
        self._due: queue.SimpleQueue[FromEngineStub | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="unary-writer", daemon=True)
        self._thread.start()

    def read(self) -> None:
        """Take requests until the stage has gone; what is in flight then is aborted."""
        with contextlib.suppress(ChannelError):  # cut off in the middle: it has gone too
            while (message := self._channel.receive()) is not None:
                if isinstance(message, UnaryCancel):
                    self._abort(message.number)
                else:
                    self._server.submit(message, self)
        with self._lock:
            numbers = list(self._uids)
        for number in numbers:
            self._abort(number)

    def begin(self, number: int, uid: int) -> None:
        """Remember that a request is in flight."""
        with self._lock:
            self._uids[number] = uid

    def end(self, number: int) -> None:
        """Forget it."""
        with self._lock:
            self._uids.pop(number, None)

    def put(self, message: FromEngineStub) -> None:
        """Have `message` sent; returns at once."""
        self.end(message.number)
        self._due.put(message)

    def close(self) -> None:
        """End the connection. Repeatable."""
        self._channel.shutdown()  # wakes the reader
        self._due.put(None)

    def release(self) -> None:
        """Free the connection, which nobody reads any more."""
        self.close()
        self._thread.join(timeout=5)
        self._channel.close()

    def _abort(self, number: int) -> None:
        with self._lock:
            uid = self._uids.get(number)
        if uid is not None:
            self._server.abort(uid)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # it has gone; the reader notices
            while (message := self._due.get()) is not None:
                try:
                    self._channel.send(message)
                except ChannelError as error:
                    log.error("request %d: %s", message.number, error)
                    failed = UnaryFailed(message.number, TridentError(_TOO_LARGE).report())
                    self._channel.send(failed)
        self._channel.shutdown()


class _UnarySink:
    """Answers one request of a stage. A `ResponseSink`."""

    def __init__(self, number: int, peer: _Peer, block_size: int) -> None:
        self._number = number
        self._peer = peer
        self._block_size = block_size

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        """Answer with `chunks`, which are all there is."""
        assert last, "a request that does not stream is answered once"
        self._peer.put(UnaryAnswer(self._number, chunks, self._block_size))

    def fail(self, error: TridentError) -> None:
        """Answer with an error."""
        self._peer.put(UnaryFailed(self._number, error.report()))
