"""Where the responses of one request go: encoded, then through Triton's response sender.

Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from engine.errors import RequestCancelledError, TridentError
from engine.protocol.messages import Chunk, DetokenizerInput
from engine.service.cancellation import check_interval_s
from engine.service.outputs import Array
from engine.service.stub.delivery import AckWindow
from engine.service.triton import FINAL, Stage, send

TensorsOf = Callable[[list[Chunk]], dict[str, Array]]

_ENCODER = msgspec.msgpack.Encoder()


class EnsembleSink:
    """Answers a request of the ensemble through its next stage, the detokenizer.

    A `ResponseSink`.
    """

    def __init__(
        self,
        stage: Stage,
        sender: Any,
        template: DetokenizerInput,
        tensors_of: TensorsOf,
        seal: Callable[[bytes], bytes],
        window: AckWindow,
        num_in_flight: Callable[[], int],
    ) -> None:
        """Answer through `sender`.

        Args:
            template: what all messages share.
            tensors_of: makes the outputs that the ensemble gets from the engine itself.
            seal: see `engine.service.link`.
            window: of the messages of all requests.
            num_in_flight: how many requests there are.
        """
        self._stage = stage
        self._sender = sender
        self._template = template
        self._tensors_of = tensors_of
        self._seal = seal
        self._window = window
        self._num_in_flight = num_in_flight
        self._next_check = -math.inf

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        """Answer with `chunks`."""
        now = time.monotonic()
        check = now >= self._next_check
        if check:
            self._next_check = now + check_interval_s(self._num_in_flight())
        message = structs.replace(
            self._template,
            chunks=chunks,
            last=last,
            check_cancelled=check,
            number=self._window.enter(),
        )
        self._send(message, self._tensors_of(chunks))

    def fail(self, error: TridentError) -> None:
        """Answer with `error`, after the chunks before it; if the client has gone, with the end."""
        if isinstance(error, RequestCancelledError):
            self._sender.send(flags=FINAL)
            return
        error_alone = structs.replace(
            self._template,
            last=True,
            number=self._window.enter(),
            error=error.report(),
        )
        self._send(error_alone, {})

    def _send(self, message: DetokenizerInput, tensors: dict[str, Array]) -> None:
        data = self._seal(_ENCODER.encode(message))
        tensors["detokenizer_input"] = np.frombuffer(data, dtype=np.uint8)
        send_response(self._stage, self._sender, tensors, last=message.last)


class ClientSink:
    """Answers a client that called the engine itself. A `ResponseSink`."""

    def __init__(
        self, stage: Stage, sender: Any, tensors_of: TensorsOf, on_end: Callable[[], None]
    ) -> None:
        """Answer through `sender`.

        Args:
            tensors_of: makes the outputs that the client asked for.
            on_end: called just before the last response.
        """
        self._stage = stage
        self._sender = sender
        self._tensors_of = tensors_of
        self._on_end = on_end

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        """Answer with `chunks`."""
        if last:
            self._on_end()
        send_response(self._stage, self._sender, self._tensors_of(chunks), last=last)

    def fail(self, error: TridentError) -> None:
        """Answer with `error`."""
        self._on_end()
        send_error(self._stage, self._sender, error)


def send_response(stage: Stage, sender: Any, tensors: Mapping[str, Array], *, last: bool) -> None:
    """Send output tensors; nothing may follow the `last`."""
    send(sender, stage.response(tensors), last=last)


def send_error(stage: Stage, sender: Any, error: Exception) -> None:
    """Answer with `error` alone; a request that was cancelled just ends."""
    if isinstance(error, RequestCancelledError):
        sender.send(flags=FINAL)
    else:
        send(sender, stage.error_response(error), last=True)
