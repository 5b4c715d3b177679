"""The engine stub: requests of Triton to the engine process, its outputs to Triton's responses.

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
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.errors import RequestCancelledError, TridentError
from engine.service.cancellation import CancelListener, CancelPoller
from engine.service.client import EngineClient
from engine.service.engine_inputs import EngineInputs, parse_engine_inputs
from engine.service.messages import Chunk, DetokenizerInput
from engine.service.postprocessor import chunk_tensors
from engine.service.triton import Stage, input_tensors, request_parameters

CANCEL_CHECK_INTERVAL_S = 0.05  # per request of the ensemble; one check is a round trip


class Responder:
    """Owns the engine process and the ways in which cancellations come."""

    def __init__(self, config: EngineConfig, stage: Stage) -> None:
        """Start the engine process; raises `TridentError` if its engine cannot start."""
        self._stage = stage
        self._client = EngineClient(config, stage.log.info)
        self._listener = CancelListener(self._client.abort)
        self._poller = CancelPoller(self._client.abort)

    def submit(self, request: Any, sender: Any) -> None:
        """Have `request` answered through `sender`, its response sender.

        Raises:
            TridentError: the request is wrong, or the engine process is gone.
        """
        inputs = parse_engine_inputs(
            input_tensors(request),
            request_parameters(request),
            request.timeout(),
            self._client.ready,
        )
        wanted = request.requested_output_names()

        def make_sink(uid: int) -> _Sink:
            if inputs.options is not None:
                encode = _ForDetokenizer(uid, inputs, self._listener.address)
                return _Sink(self._stage, sender, encode, lambda: None)
            # Triton tells of a cancellation only those who ask, and only if no ensemble is between.
            self._poller.watch(uid, sender.is_cancelled)
            return _Sink(self._stage, sender, _ForClient(wanted), lambda: self._poller.forget(uid))

        self._client.submit(inputs.request, make_sink)

    def send_error(self, sender: Any, error: Exception) -> None:
        """Answer with `error` alone."""
        sender.send(self._stage.error_response(error), flags=_FINAL)

    def close(self) -> None:
        """End the engine process."""
        self._poller.close()
        self._listener.close()
        self._client.close()


_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

Encode = Callable[[list[Chunk]], dict[str, NDArray[Any]]]


class _Sink:
    """Sends the responses of one request."""

    def __init__(
        self, stage: Stage, sender: Any, encode: Encode, on_end: Callable[[], None]
    ) -> None:
        self._stage = stage
        self._sender = sender
        self._encode = encode
        self._on_end = on_end

    def send(self, chunks: list[Chunk], *, last: bool) -> None:
        self._send(self._stage.response(self._encode(chunks)), last=last)

    def fail(self, error: TridentError) -> None:
        if isinstance(error, RequestCancelledError):
            # Nobody listens, and release 24.10 never frees an ensemble's cancelled request that
            # ends with an error.
            self._on_end()
            self._sender.send(flags=_FINAL)
        else:
            self._send(self._stage.error_response(error), last=True)

    def _send(self, response: Any, *, last: bool) -> None:
        if last:
            self._on_end()
        # The flag goes with the last response: alone, it would arrive as an empty response.
        self._sender.send(response, flags=_FINAL if last else 0)


class _ForDetokenizer:
    """Encodes responses that go through the ensemble's next stage."""

    def __init__(self, uid: int, inputs: EngineInputs, cancel_address: str) -> None:
        assert inputs.options is not None
        self._uid = uid
        self._num_prompt_tokens = len(inputs.request.prompt_token_ids)
        self._skip_special_tokens = inputs.skip_special_tokens
        self._outputs = inputs.options.outputs
        self._cancel_address = cancel_address
        self._last_check = -math.inf

    def __call__(self, chunks: list[Chunk]) -> dict[str, NDArray[Any]]:
        now = time.monotonic()
        check = now - self._last_check >= CANCEL_CHECK_INTERVAL_S
        if check:
            self._last_check = now
        message = DetokenizerInput(
            uid=self._uid,
            chunks=chunks,
            cancel_address=self._cancel_address if check else "",
            num_prompt_tokens=self._num_prompt_tokens,
            skip_special_tokens=self._skip_special_tokens,
            outputs=self._outputs,
        )
        data = msgspec.msgpack.encode(message)
        return {"detokenizer_input": np.frombuffer(data, dtype=np.uint8)}


class _ForClient:
    """Encodes responses for a client that called the engine itself."""

    def __init__(self, wanted: set[str]) -> None:
        self._wanted = wanted

    def __call__(self, chunks: list[Chunk]) -> dict[str, NDArray[Any]]:
        return {
            name: array for name, array in chunk_tensors(chunks).items() if name in self._wanted
        }
