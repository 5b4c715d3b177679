"""Inbox: the messages that arrive for the engine's loop while it runs a step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine.fair_queue import FairQueue
from engine.protocol.messages import Abort, AddRequest, Shutdown, ToEngine

_REQUEST_BYTES = 2**12  # of a prompt, what adding a request takes beside it


class Inbox:
    """A queue in which messages that end work overtake new requests. Thread-safe.

    New requests are taken tenants in turn, by the length of their prompts: a burst of one tenant
    takes the loop many iterations, and another's request comes after one of its requests.

    A request that is aborted before the loop has taken it is dropped at once. The number of
    requests in it is bounded by `engine.service.stub.admission`: a request counts there until the
    process has said that it has ended.
    """

    def __init__(self, on_dropped: Callable[[AddRequest], None]) -> None:
        """`on_dropped` is called with each dropped request; the loop never gets it."""
        self._on_dropped = on_dropped
        self._arrived = threading.Condition()
        self._requests: dict[int, AddRequest] = {}  # by uid
        self._turns: FairQueue[int] = FairQueue()  # uids, of requests that were dropped too
        self._others: deque[ToEngine] = deque()

    def put(self, message: ToEngine) -> None:
        """Add `message`; returns at once."""
        dropped = None
        with self._arrived:
            if isinstance(message, AddRequest):
                self._requests[message.uid] = message
                cost = _REQUEST_BYTES + len(message.prompt_token_ids)
                self._turns.push(message.uid, cost=cost, tenant=message.tenant)
            elif isinstance(message, Abort) and message.uid in self._requests:
                dropped = self._requests.pop(message.uid)
            else:
                if isinstance(message, Shutdown):
                    self._requests.clear()
                    self._turns.clear()
                self._others.append(message)
            self._arrived.notify()
        if dropped is not None:
            self._on_dropped(dropped)

    def get(self, *, wait: bool) -> ToEngine | None:
        """Take the next message; without `wait`, None if there is none."""
        with self._arrived:
            while wait and not self._others and not self._requests:
                self._arrived.wait()
            if self._others:
                return self._others.popleft()
            while self._turns:
                if (request := self._requests.pop(self._turns.pop(), None)) is not None:
                    return request
            return None
