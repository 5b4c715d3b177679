"""Writer: sends the messages of the engine process to the stub."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

from engine.protocol import FromEngine, ToEngine
from engine.service.channel import Channel, ChannelError
from engine.step_outputs import StepOutputs

log = logging.getLogger("trident.engine")

T = TypeVar("T")
EngineChannel = Channel[FromEngine, ToEngine]


class Writer:
    """Sends from its own thread, so that the engine loop never waits for the socket.

    Outputs that were queued while one frame was sent are merged into the next one.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[FromEngine | StepOutputs | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine | StepOutputs) -> None:
        """Queue `message`; returns at once. Of `StepOutputs` only the rows are sent."""
        self._queue.put(message)

    def close(self) -> None:
        """Wait until what is queued has been sent."""
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            while (message := self._queue.get()) is not None:
                for merged in _merge([message, *drain(self._queue)]):
                    if merged is None:
                        return
                    self._send(merged)
        except OSError:
            return  # the stub has gone; the reader thread ends the process
        except Exception:
            log.exception("outputs could not be sent")
            os._exit(1)  # heartbeats must not hide that outputs are lost

    def _send(self, message: FromEngine | StepOutputs) -> None:
        """Send `message`; outputs that are too much for one frame go in several."""
        if not isinstance(message, StepOutputs):
            self._channel.send(message)
            return
        try:
            self._channel.send(message.message())
        except ChannelError:
            if len(message) < 2:
                raise
            for half in message.split():
                self._send(half)


def _merge(
    messages: list[FromEngine | StepOutputs | None],
) -> Iterator[FromEngine | StepOutputs | None]:
    """Yield `messages` in order, each run of outputs as one."""
    outputs: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, StepOutputs):
            outputs.append(message)
            continue
        if outputs:
            yield StepOutputs.concatenated(outputs)
            outputs = []
        yield message
    if outputs:
        yield StepOutputs.concatenated(outputs)


def drain(source: queue.SimpleQueue[T]) -> Iterator[T]:
    """Yield what is queued now, without waiting."""
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return
