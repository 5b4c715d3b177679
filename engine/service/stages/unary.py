"""The stage that answers plain `infer()`: each request with one response.

Triton answers it for models alone that send one response; the ensemble sends a stream. This stage
does what the ensemble's stages do, and asks the engine stub directly (why:
`engine.service.unary_link`). So a request passes through two processes of models in place of three.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.hub import resolve_checkpoint
from engine.config.engine_config import EngineConfig
from engine.errors import EngineDeadError, RequestError, TridentError, UnsupportedError
from engine.protocol.channel import Channel, ChannelError
from engine.protocol.messages import DetokenizerInput
from engine.service.cancellation import CancelPoller
from engine.service.outputs import chunk_tensors
from engine.service.parameters import queue_tenant
from engine.service.sampling_inputs import any_boolean
from engine.service.stages.postprocessor import Postprocessor
from engine.service.stages.preprocessor import Preprocessor
from engine.service.stages.request_inputs import parse_inputs, requested_outputs
from engine.service.stages.tokenized_request import engine_tensors
from engine.service.stages.tokenizer_queue import TokenizerQueue, size_of
from engine.service.tensors import InputReader, Tensors
from engine.service.unary_link import (
    FromEngineStub,
    ToEngineStub,
    UnaryAnswer,
    UnaryCancel,
    UnaryRequest,
    UnaryStop,
    connect,
)
from engine.text.load_tokenizer import load_tokenizer

log = logging.getLogger("trident.unary")

Respond = Callable[[Tensors | Exception], None]
_Stages = tuple[Preprocessor, Postprocessor]


@dataclass(frozen=True)
class UnaryCall:
    """One request of a client.

    Attributes:
        tensors: its inputs by name.
        parameters: its request parameters.
        timeout_us: of the Triton request; 0: none.
        request_id: given by the client; may be empty.
        respond: answers it, once, with output tensors or an error; in any thread.
        is_cancelled: asks whether its client has gone; not after it has been answered.
    """

    tensors: Tensors
    parameters: Mapping[str, Any]
    timeout_us: int
    request_id: str
    respond: Respond
    is_cancelled: Callable[[], bool]


@dataclass(frozen=True)
class _Pending:
    """What is needed to answer a request that the engine stub has."""

    respond: Respond
    outputs: list[str]
    num_prompt_tokens: int = 0
    skip_special_tokens: bool = True


class UnaryStage:
    """Tokenises requests, has the engine complete them, and decodes the answers.

    What waits to be tokenised is bounded as before the tokenizer stage; the engine stub bounds what
    waits behind that. The tokenizer is loaded for the first request: until then the stage is small.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Serve the model that `config` names."""
        self._config = config
        self._queue = TokenizerQueue.of(config)
        self._numbers = itertools.count(1)
        self._poller = CancelPoller(self._cancel)
        self._connecting = threading.Lock()
        self._connection: _Connection | None = None
        self._loading = threading.Lock()
        self._stages: _Stages | None = None

    def submit(self, call: UnaryCall) -> None:
        """Take a request, which is answered from another thread.

        Raises:
            QueueFullError: as many wait as may.
        """
        arrival_time = time.monotonic()
        inputs = InputReader(call.tensors)

        def answer() -> None:
            self._begin(call, arrival_time)

        if inputs.boolean("stop"):
            # Not before the request that it stops, which has the same id.
            self._queue.put_after(answer, call.request_id)
            return
        self._queue.put(
            answer,
            size_of(call.tensors),
            tenant=queue_tenant(inputs, call.parameters, self._config.tenant_key),
            request_id=call.request_id,
        )

    def close(self) -> None:
        """Answer what waits; what the engine stub has gets an error."""
        self._queue.close()
        self._poller.close()
        if self._connection is not None:
            self._connection.close()

    # ---- in the queue's threads -------------------------------------------------------------

    def _begin(self, call: UnaryCall, arrival_time: float) -> None:
        number = next(self._numbers)
        try:
            message, pending = self._message(number, call, arrival_time)
            connection = self._connected()
            self._poller.watch(number, call.is_cancelled)
            connection.ask(message, pending)
        except Exception as error:
            self._poller.forget(number)
            call.respond(error)

    def _message(
        self, number: int, call: UnaryCall, arrival_time: float
    ) -> tuple[UnaryRequest | UnaryStop, _Pending]:
        inputs = InputReader(call.tensors)
        if inputs.boolean("stop"):
            pending = _Pending(call.respond, requested_outputs(inputs))
            return UnaryStop(number, call.request_id), pending
        if any_boolean(inputs, "stream", "streaming"):
            raise UnsupportedError(
                "must be false for a model that answers once; call "
                f"{self._config.served_model_name or 'ensemble'} to stream",
                param="stream",
            )
        asked = parse_inputs(call.tensors, call.parameters, call.timeout_us)
        preprocess, _ = self._loaded()
        request = preprocess(asked, arrival_time)
        pending = _Pending(
            call.respond,
            request.options.outputs,
            len(request.input_ids),
            request.sampling_params.skip_special_tokens,
        )
        return UnaryRequest.of(number, call.request_id, engine_tensors(request)), pending

    def _connected(self) -> _Connection:
        """Return the connection to the engine stub, a new one if that stub has been replaced.

        Raises:
            EngineDeadError: there is none.
        """
        with self._connecting:
            if self._connection is not None and self._connection.is_lost:
                self._connection.close()
                self._connection = None
            if self._connection is None:
                try:
                    self._connection = _Connection(connect(), self._answer)
                except OSError as error:
                    log.warning("the engine stub cannot be reached: %s", error)
                    raise EngineDeadError(
                        "the model engine is not loaded; try again later"
                    ) from None
            return self._connection

    def _loaded(self) -> _Stages:
        """Return what goes before the engine and what follows it, loaded when first needed.

        Raises:
            EngineDeadError: they could be loaded when the server started, and now they cannot.
        """
        with self._loading:
            if self._stages is None:
                self._stages = self._load()
            return self._stages

    def _load(self) -> _Stages:
        config = self._config
        try:
            tokenizer = load_tokenizer(config, resolve_checkpoint(config.model, weights=False))
            return (
                Preprocessor.from_config(config, tokenizer),
                Postprocessor.from_config(config, tokenizer),
            )
        except TridentError as error:
            raise EngineDeadError(f"the tokenizer cannot be loaded any more: {error}") from None

    # ---- in other threads -------------------------------------------------------------------

    def _cancel(self, number: int) -> None:
        connection = self._connection  # which another thread may replace
        if connection is not None:
            connection.cancel(number)

    def _answer(self, number: int, pending: _Pending, message: UnaryAnswer | TridentError) -> None:
        """Answer a request that the engine stub has ended."""
        self._poller.forget(number)
        if isinstance(message, TridentError):
            pending.respond(message)
            return
        try:
            tensors = self._tensors(pending, message)
        except Exception as error:
            pending.respond(error)
        else:
            pending.respond(tensors)

    def _tensors(self, pending: _Pending, answer: UnaryAnswer) -> Tensors:
        _, postprocess = self._loaded()
        decoded = postprocess(
            DetokenizerInput(
                0,
                answer.chunks,
                skip_special_tokens=pending.skip_special_tokens,
                outputs=pending.outputs,
            )
        )
        others = chunk_tensors(
            answer.chunks, pending.outputs, pending.num_prompt_tokens, answer.block_size
        )
        return {**decoded, **others}


class _Connection:
    """A connection to the engine stub, and the requests that it has over it."""

    def __init__(
        self,
        channel: Channel[ToEngineStub, FromEngineStub],
        on_end: Callable[[int, _Pending, UnaryAnswer | TridentError], None],
    ) -> None:
        """Read in a thread; `on_end` is called there, once for each request."""
        self._channel = channel
        self._on_end = on_end
        self._lock = threading.Lock()
        self._pending: dict[int, _Pending] = {}
        self.is_lost = False
        self._thread = threading.Thread(target=self._run, name="unary-reader", daemon=True)
        self._thread.start()

    def ask(self, message: UnaryRequest | UnaryStop, pending: _Pending) -> None:
        """Send a request.

        Raises:
            EngineDeadError: the connection has ended.
            RequestError: the request is too large.
        """
        with self._lock:
            if self.is_lost:
                raise EngineDeadError("the model engine has been unloaded; try again")
            self._pending[message.number] = pending
        try:
            self._channel.send(message)
        except ChannelError as error:
            if self._pop(message.number) is not None:
                raise RequestError(f"the request is too large: {error}") from None
        except OSError:
            return  # the reader notices, and ends all requests

    def cancel(self, number: int) -> None:
        """Report that the client of a request has gone."""
        with self._lock:
            if number not in self._pending:
                return
        try:
            self._channel.send(UnaryCancel(number))
        except OSError:
            return

    def close(self) -> None:
        """End the connection: what is in flight gets an error."""
        self._channel.shutdown()
        self._thread.join(timeout=5)
        self._channel.close()

    def _run(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._end(message)
        except ChannelError:
            pass  # cut off in the middle: the stub has gone
        except Exception:
            log.exception("answers of the engine stub cannot be read any more")
        with self._lock:
            self.is_lost = True
            pending, self._pending = self._pending, {}
        error = EngineDeadError("the model engine has been unloaded; the request is lost")
        for number, each in pending.items():
            self._on_end(number, each, error)

    def _end(self, message: FromEngineStub) -> None:
        pending = self._pop(message.number)
        if pending is None:
            return
        if isinstance(message, UnaryAnswer):
            self._on_end(message.number, pending, message)
        else:
            self._on_end(message.number, pending, TridentError.of(message.error))

    def _pop(self, number: int) -> _Pending | None:
        with self._lock:
            return self._pending.pop(number, None)
