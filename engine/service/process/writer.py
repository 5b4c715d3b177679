"""Writer: sends the messages of the engine process to the stub."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import TypeVar

from engine.protocol import FromEngine, ToEngine
from engine.service.channel import Channel, ChannelError
from engine.step_outputs import StepOutputs

log = logging.getLogger("trident.engine")

# Between two frames with outputs, for each row of the first one: a row costs the stub about 3 us in
# the process that also sends the responses, so that frames take a twentieth of its time.
_INTERVAL_PER_ROW_S = 60e-6
_MOST_INTERVAL_S = 0.06  # of 1,000 rows, whose responses are 0.3 s apart and more

T = TypeVar("T")
EngineChannel = Channel[FromEngine, ToEngine]
_Message = FromEngine | StepOutputs | None  # None: the end


class Writer:
    """Sends from its own thread, so that the engine loop never waits for the socket.

    Outputs that were queued while one frame was sent are merged into the next one, in which each
    sequence has one row. Frames with outputs of many sequences keep an interval, 60 ms at most, so
    that fast steps share a frame.
    """

    def __init__(self, channel: EngineChannel) -> None:
        self._channel = channel
        self._next_outputs = 0.0  # time.monotonic() second
        self._queue: queue.SimpleQueue[_Message] = queue.SimpleQueue()
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
                for merged in _merge(self._with_more([message, *drain(self._queue)])):
                    if merged is None:
                        return
                    self._send(merged)
        except OSError:
            return  # the stub has gone; the reader thread ends the process
        except Exception:
            log.exception("outputs could not be sent")
            os._exit(1)  # heartbeats must not hide that outputs are lost

    def _with_more(self, messages: list[_Message]) -> list[_Message]:
        """Add what comes until outputs may be sent again, or something else is to be sent."""
        while all(isinstance(each, StepOutputs) for each in messages):
            wait_s = self._next_outputs - time.monotonic()
            if wait_s <= 0:
                break
            try:
                messages.append(self._queue.get(timeout=wait_s))
            except queue.Empty:
                break
            messages += drain(self._queue)
        return messages

    def _send(self, message: FromEngine | StepOutputs) -> None:
        """Send `message`; outputs that are too much for one frame go in several."""
        if not isinstance(message, StepOutputs):
            self._channel.send(message)
            return
        interval_s = min(_INTERVAL_PER_ROW_S * len(message), _MOST_INTERVAL_S)
        self._next_outputs = time.monotonic() + interval_s
        try:
            self._channel.send(message.message())
        except ChannelError:
            if len(message) < 2:
                raise
            for half in message.split():
                self._send(half)


def _merge(messages: list[_Message]) -> Iterator[_Message]:
    """Yield `messages` in order, each run of outputs as one."""
    outputs: list[StepOutputs] = []
    for message in messages:
        if isinstance(message, StepOutputs):
            outputs.append(message)
            continue
        if outputs:
            yield StepOutputs.concatenated(outputs).joined()
            outputs = []
        yield message
    if outputs:
        yield StepOutputs.concatenated(outputs).joined()


def drain(source: queue.SimpleQueue[T]) -> Iterator[T]:
    """Yield what is queued now, without waiting."""
    while True:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return
