"""Window: bounds the responses that are on their way to the detokenizer."""

from __future__ import annotations

import threading

_SIZE = 64  # enough that the stage never waits for a message; it takes them in about 20 ms
_REPORTED = 16  # acknowledge every 16th message
_LOST_S = 0.1  # after so long without news, what is under way counts as lost


class Window:
    """Holds a message back while as many as fit are under way before the detokenizer.

    So no queue grows in Triton, which has no limit there, and a response has the tokens that came
    while it waited for its turn. Messages arrive in order; so what Triton dropped on the way
    is no longer under way when a later one has arrived. Thread-safe.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_sent = self._num_arrived = 0

    def enter(self) -> int:
        """Wait until there is room; return the sequence number to acknowledge, or 0 for none."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, _LOST_S):
                self._num_arrived = self._num_sent
            self._num_sent += 1
            return 0 if self._num_sent % _REPORTED else self._num_sent

    def arrived(self, number: int) -> None:
        """Record that the message with this sequence number has arrived."""
        with self._changed:
            self._num_arrived = max(self._num_arrived, min(number, self._num_sent))
            self._changed.notify_all()

    def _has_room(self) -> bool:
        return self._num_sent - self._num_arrived < _SIZE
