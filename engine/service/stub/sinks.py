"""Where the responses of one request go: encoded, then through Triton's response sender.

Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils
from msgspec import structs
from numpy.typing import NDArray

from engine.errors import RequestCancelledError, TridentError
from engine.protocol import Chunk, DetokenizerInput
from engine.service.outputs import chunk_tensors
from engine.service.triton import Stage

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
CANCEL_CHECK_INTERVAL_S = 0.05  # per request of the ensemble; one check is a round trip

Encode = Callable[[list[Chunk]], dict[str, NDArray[Any]]]


class Sink:
    """Sends the responses of one request; a `ResponseSink`."""

    def __init__(
        self,
        stage: Stage,
        sender: Any,
        encode: Encode,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Answer through `sender`; call `on_end` just before the last response."""
        self._stage = stage
        self._sender = sender
        self._encode = encode
        self._on_end = on_end

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        """Answer with `chunks`."""
        self._send(self._stage.response(self._encode(chunks)), last=last)

    def fail(self, error: TridentError) -> None:
        """Answer with `error`; to a client that has gone, with the end alone."""
        if isinstance(error, RequestCancelledError):
            # Nobody listens, and release 24.10 never frees an ensemble's cancelled request that
            # ends with an error.
            self._on_end()
            self._sender.send(flags=FINAL)
        else:
            self._send(self._stage.error_response(error), last=True)

    def _send(self, response: Any, *, last: bool) -> None:
        if last:
            self._on_end()
        # The flag goes with the last response: alone, it would arrive as an empty response.
        self._sender.send(response, flags=FINAL if last else 0)


class ForDetokenizer:
    """Encodes responses that go through the ensemble's next stage."""

    def __init__(self, template: DetokenizerInput, seal: Callable[[bytes], bytes]) -> None:
        """`template` is what all responses share; `seal` as of `engine.service.link`."""
        self._template = template
        self._seal = seal
        self._last_check = -math.inf

    def __call__(self, chunks: list[Chunk]) -> dict[str, NDArray[Any]]:
        """Return the engine's output tensors for one response."""
        now = time.monotonic()
        check = now - self._last_check >= CANCEL_CHECK_INTERVAL_S
        if check:
            self._last_check = now
        message = structs.replace(self._template, chunks=chunks, check_cancelled=check)
        data = self._seal(msgspec.msgpack.encode(message))
        return {"detokenizer_input": np.frombuffer(data, dtype=np.uint8)}


class ForClient:
    """Encodes responses for a client that called the engine itself."""

    def __init__(self, wanted: set[str]) -> None:
        """`wanted` are the outputs that it asked for."""
        self._wanted = wanted

    def __call__(self, chunks: list[Chunk]) -> dict[str, NDArray[Any]]:
        """Return the engine's output tensors for one response."""
        return {
            name: array for name, array in chunk_tensors(chunks).items() if name in self._wanted
        }
