"""Writer: sends the messages of the engine process to the stub."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator

from engine.protocol.messages import FromEngine, ToEngine
from engine.protocol.step_outputs import StepOutputs
from engine.service.channel import Channel, ChannelError

log = logging.getLogger("trident.engine")

# Between two frames with outputs, for each row of the first one: a row costs the stub about 3 us in
# the process that also sends the responses, so that frames take a twentieth of its time.
_INTERVAL_PER_ROW_S = 60e-6
_MOST_INTERVAL_S = 0.06  # of 1,000 rows, whose responses are 0.3 s apart and more

EngineChannel = Channel[FromEngine, ToEngine]
_Message = FromEngine | StepOutputs | None  # None: the end


class Writer:
    """Sends without ever having the engine loop wait for the socket.

    Outputs go out in the loop's own thread if the socket takes them at once: another thread that
    was woken for them would compete with the next step, for the interpreter too. All else is sent
    by a thread, which merges outputs that were queued into one frame, in which each sequence has
    one row. Frames with outputs of many sequences keep an interval, 60 ms at most, so that fast
    steps share a frame.
    """

    def __init__(self, channel: EngineChannel) -> None:
        """Be the only one that sends on `channel`."""
        self._channel = channel
        self._next_outputs = 0.0  # time.monotonic() second
        self._changed = threading.Condition()
        self._queued: list[_Message] = []
        self._is_idle = False  # the thread, which has nothing to send
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)
        self._thread.start()

    def put(self, message: FromEngine | StepOutputs) -> None:
        """Send or queue `message`; returns at once. Of `StepOutputs` only the rows are sent."""
        with self._changed:
            if isinstance(message, StepOutputs) and self._send_at_once(message):
                return
            self._queued.append(message)
            # Else the thread comes by itself, when the interval is over.
            if self._is_idle or not isinstance(message, StepOutputs):
                self._changed.notify()

    def close(self) -> None:
        """Wait until what is queued has been sent."""
        with self._changed:
            self._queued.append(None)
            self._changed.notify()
        self._thread.join(timeout=5)

    def _send_at_once(self, outputs: StepOutputs) -> bool:
        if self._queued or not self._is_idle or time.monotonic() < self._next_outputs:
            return False
        try:
            sent = self._channel.send_at_once(outputs.message())
        except (ChannelError, OSError):
            return False  # the thread knows what to do
        if sent:
            self._keep_interval(outputs)
        return sent

    def _run(self) -> None:
        try:
            while True:
                for merged in _merge(self._take()):
                    if merged is None:
                        return
                    self._send(merged)
        except OSError:
            return  # the stub has gone; the reader thread ends the process
        except Exception:
            log.exception("outputs could not be sent")
            os._exit(1)  # heartbeats must not hide that outputs are lost

    def _take(self) -> list[_Message]:
        """Wait until there is something to send: until outputs may be sent, if it is outputs."""
        with self._changed:
            self._is_idle = True
            self._changed.wait_for(lambda: self._queued)
            self._is_idle = False
            while all(isinstance(each, StepOutputs) for each in self._queued):
                wait_s = self._next_outputs - time.monotonic()
                if wait_s <= 0:
                    break
                self._changed.wait(wait_s)
            messages, self._queued = self._queued, []
            return messages

    def _keep_interval(self, outputs: StepOutputs) -> None:
        interval_s = min(_INTERVAL_PER_ROW_S * len(outputs), _MOST_INTERVAL_S)
        self._next_outputs = time.monotonic() + interval_s

    def _send(self, message: FromEngine | StepOutputs) -> None:
        """Send `message`; outputs that are too much for one frame go in several."""
        if not isinstance(message, StepOutputs):
            self._channel.send(message)
            return
        self._keep_interval(message)
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
