"""The engine stub: passes Triton's requests to the engine process, and its outputs to responses.

Importable only inside Triton's Python backend.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils
from msgspec import structs

from engine.config.engine_config import EngineConfig
from engine.errors import RequestCancelledError, TridentError
from engine.protocol.messages import Chunk, DetokenizerInput, OutputDetails, ResponseOptions
from engine.service.cancellation import CancelPoller, check_interval_s
from engine.service.link import EngineEnd
from engine.service.outputs import Array, chunk_tensors
from engine.service.stub.delivery import AckWindow
from engine.service.stub.engine_client import EngineClient
from engine.service.stub.engine_inputs import (
    check_stop_id,
    parse_engine_inputs,
    parse_options,
)
from engine.service.stub.metrics import EngineMetrics
from engine.service.stub.request_log import log_refusal
from engine.service.stub.stream import ResponseSink
from engine.service.stub.unary_server import UnaryServer
from engine.service.tensors import InputReader, Tensors
from engine.service.triton import FINAL, Stage, input_tensors, request_id, request_parameters, send

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


class Responder:
    """Owns the engine process, and what receives cancellations."""

    def __init__(self, config: EngineConfig, stage: Stage) -> None:
        """Start the engine process; raises `TridentError` if its engine cannot start."""
        self._stage = stage
        self._tenant_key = config.tenant_key
        self._metrics = EngineMetrics(
            config, pb_utils.MetricFamily, model=stage.model, version=stage.version
        )
        self._client = EngineClient(config, self._metrics, stage.log.info)
        self._window = AckWindow()
        self._link = EngineEnd(self._client.abort, self._client.fail, self._window.arrived)
        self._poller = CancelPoller(self._client.abort)
        self._unary = UnaryServer(self._client, stage.for_client, self._metrics.request_refused)

    @property
    def is_ready(self) -> bool:
        """Whether the engine takes requests now."""
        return self._client.health.state == "ready"

    def submit(self, request: Any, sender: Any) -> None:
        """Submit `request`, to be answered through `sender`, its response sender.

        Raises:
            TridentError: the request is wrong, or there is no engine now.
        """
        tensors = input_tensors(request)
        control = InputReader(tensors)
        if control.boolean("health"):
            self._answer_health(sender)
        elif control.boolean("stop"):
            self._stop(request, tensors, sender)
        else:
            name = ""
            try:
                name = request_id(request)
                self._generate(request, name, tensors, sender)
            except Exception as error:
                log_refusal(name, error)
                if not isinstance(error, RequestCancelledError):
                    self._metrics.request_refused(error)
                raise

    def send_error(self, sender: Any, error: Exception) -> None:
        """Answer with `error` alone."""
        send_error(self._stage, sender, error)

    def close(self) -> None:
        """End the engine process."""
        self._unary.close()
        self._poller.close()
        self._link.close()
        # First: after a reload, the metrics are already those of the next one.
        self._metrics.close()
        self._client.close()

    def _answer_health(self, sender: Any) -> None:
        self._client.check_ready()
        health = msgspec.json.encode(self._client.health)
        tensors = {"health": np.array([health], dtype=object)}
        send_response(self._stage, sender, tensors, last=True)

    def _stop(self, request: Any, tensors: Tensors, sender: Any) -> None:
        """End the requests of the same id early; the request to stop gets an empty answer."""
        name = request_id(request)
        check_stop_id(name)
        count = self._client.stop(name)
        self._stage.log.info("stop: ends %d requests of id %r", count, name)
        nothing = Chunk(0, b"", b"", OutputDetails(finish_reason="abort"))
        options = parse_options(tensors, 0)
        sink = self._sink(request, sender, options, DetokenizerInput(0, []), 0, lambda: None)
        sink.send([nothing], last=True)

    def _generate(self, request: Any, name: str, tensors: Tensors, sender: Any) -> None:
        self._client.check_ready()
        # Once: of a request of the ensemble, Triton reports this only if the client left before.
        if sender.is_cancelled():
            raise RequestCancelledError("the client has disconnected")
        inputs = parse_engine_inputs(
            tensors,
            request_parameters(request),
            request.timeout(),
            self._client.ready,
            request_id=name,
            tenant_key=self._tenant_key,
        )
        num_prompt_tokens = len(inputs.request.prompt_token_ids)
        skip_special_tokens, options = inputs.skip_special_tokens, inputs.options

        def make_sink(uid: int) -> ResponseSink:
            template = DetokenizerInput(uid, [], skip_special_tokens=skip_special_tokens)
            on_end = partial(self._poller.forget, uid)
            sink = self._sink(request, sender, options, template, num_prompt_tokens, on_end)
            if options is None:  # from here on, a cancellation has to be polled
                self._poller.watch(uid, sender.is_cancelled)
            return sink

        self._client.submit(inputs.request, make_sink)

    def _sink(
        self,
        request: Any,
        sender: Any,
        options: ResponseOptions | None,
        template: DetokenizerInput,
        num_prompt_tokens: int,
        on_end: Callable[[], None],
    ) -> ResponseSink:
        """Return where the responses go: to the next stage, or to a client of the engine itself."""
        wanted = request.requested_output_names() if options is None else options.outputs
        tensors_of = partial(
            chunk_tensors,
            wanted=wanted,
            num_prompt_tokens=num_prompt_tokens,
            block_size=self._client.ready.block_size,
        )
        if options is None:
            return ClientSink(self._stage, sender, tensors_of, on_end)
        return EnsembleSink(
            self._stage,
            sender,
            msgspec.structs.replace(template, outputs=options.outputs),
            tensors_of,
            self._link.seal,
            self._window,
            lambda: self._client.num_in_flight,
        )
