"""Inbox: what has arrived for the engine's loop while it was busy with a step."""

from __future__ import annotations

import threading
from collections import deque

from engine.protocol import Abort, AddRequest, Shutdown, ToEngine


class Inbox:
    """A queue in which what ends work overtakes what begins it. For any threads.

    `engine.service.stub.admission` bounds the requests in it.
    """

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: deque[ToEngine] = deque()
        self._urgent: deque[ToEngine] = deque()
        self._waiting: set[int] = set()  # uids of the requests in _messages

    def put(self, message: ToEngine) -> None:
        """Add `message`; returns at once."""
        with self._arrived:
            if isinstance(message, AddRequest):
                self._waiting.add(message.uid)
            if isinstance(message, Shutdown):
                self._forget_requests()
            if isinstance(message, Abort) and message.uid not in self._waiting:
                self._urgent.append(message)
            else:
                self._messages.append(message)
            self._arrived.notify()

    def get(self, *, wait: bool) -> ToEngine | None:
        """Take the next message; without `wait`, None if there is none."""
        with self._arrived:
            while wait and not self._urgent and not self._messages:
                self._arrived.wait()
            if self._urgent:
                return self._urgent.popleft()
            if not self._messages:
                return None
            message = self._messages.popleft()
            if isinstance(message, AddRequest):
                self._waiting.discard(message.uid)
            return message

    def _forget_requests(self) -> None:
        self._messages = deque(m for m in self._messages if not isinstance(m, AddRequest))
        self._waiting.clear()
